"""HEAD is GET without a body, as load balancers and monitors ask."""

from pathlib import Path

from tests.service.frontends import stack

PATHS = (
    "/health",
    "/health/live",
    "/health/ready",
    "/ping",
    "/v1/health",
    "/load",
    "/version",
    "/v1/models",
    "/v1/models/fake",
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
)


async def test_head_is_get_without_a_body(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        for path in PATHS:
            whole, head = await client.get(path), await client.head(path)
            assert (whole.status_code, head.status_code) == (200, 200), path
            assert head.headers["content-type"] == whole.headers["content-type"], path
            assert int(head.headers["content-length"]) > 0, path
            assert (head.content, whole.content != b"") == (b"", True), path
        assert (await client.head("/metrics")).status_code == 200
        assert (await client.head("/v1/models/other")).status_code == 404
        refused = await client.put("/health")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        assert (await client.head("/v1/completions")).status_code == 405
        described = (await client.get("/openapi.json")).json()["paths"]
        assert "get" in described["/health"]
        assert not any("head" in verbs for verbs in described.values())


async def test_head_tells_who_is_not_well(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        served.frontend.desk.is_draining = True
        head = await client.head("/health/ready")
        assert (head.status_code, head.content) == (503, b"")
