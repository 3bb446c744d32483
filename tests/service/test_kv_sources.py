"""How a decode engine speaks to prefill engines, and what it says of those that it cannot reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_service.server.kv_sources import Sources
from tests.certificates import Authority
from tests.service.engine_fixtures import config
from tests.service.test_transfer_in import target
from tidemill.runtime.errors import FailedPrecondition

NAME = "prefill.example"


@pytest.mark.parametrize("asked", [NAME, "another.example", None])
async def test_a_certificate_bears_the_name_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: str | None
) -> None:
    """Addresses are IPs, and certificates bear none: without a name nobody could be trusted."""
    authority = Authority(tmp_path, "ca")
    flags = {"kv_tls_ca": authority.path, "kv_tls_name": asked}
    async with target("grpc", authority.sign("prefill", NAME), **flags) as made:
        await made.fetch()
        assert len(made.asks.imports) == (asked == NAME)
        text = (
            f"the certificate of the prefill engine at {made.addresses[0]} does not bear the name "
            f"that is expected, {repr(asked) if asked else 'the host of its address'}; give "
            "--kv-tls-name a name that it bears"
        )
        assert (text in caplog.text) is (asked != NAME), caplog.text


def test_a_name_without_a_ca_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match=r"prefill\.example.*give --kv-tls-ca") as caught:
        Sources(config(kv_tls_name=NAME))
    assert caught.value.param == "kv_tls_name"
