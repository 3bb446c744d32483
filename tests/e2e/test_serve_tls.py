"""`tidemill serve` with TLS, mTLS and a key: it becomes ready, and every client of ours gets in."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx

from tests.certificates import Authority
from tests.e2e.test_serve import ROOT, free_ports, serve
from tests.waiting import PATIENCE_S
from tidemill.security.keys import new_key

TIDEMILL = (sys.executable, "-m", "tidemill")


def test_a_server_with_certificates_and_keys_serves_all_our_clients(tmp_path: Path) -> None:
    """mTLS: even the supervisor has no certificate to show, and still sees that it is ready. The
    key is on no command line, and the engine listens on this machine alone."""
    authority = Authority(tmp_path / "pki", "ca")
    server, mine = authority.sign("server"), authority.sign("client", "me")
    made = new_key("alice")
    (tmp_path / "keys").write_text(made.line)
    single = "a key that stands in no file " + made.key[-8:]
    (tmp_path / "flags.yaml").write_text(f"api-key: {single}\n")
    flags = (
        *(f"--tls-cert={server.cert}", f"--tls-key={server.key}"),
        *(f"--tls-client-ca={authority.path}", f"--api-keys-file={tmp_path / 'keys'}"),
        *(f"--config={tmp_path / 'flags.yaml'}", "--host=0.0.0.0", *free_ports()),
    )
    with serve(tmp_path, "demo", *flags) as served:
        served.wait_ready()
        url = re.search(r"HTTP +(https://\S+)", served.out)
        address = re.search(r"gRPC +(\S+)", served.out)
        engine = re.search(r"engine +127\.0\.0\.1:(\d+)", served.out)
        assert url is not None
        assert address is not None
        assert engine is not None
        assert "--cacert CA.pem --cert CLIENT.pem --key CLIENT.key" in served.out
        assert "authorization: Bearer KEY" in served.out
        for pid in served.descendants().values():
            assert single not in Path(f"/proc/{pid}/cmdline").read_text()
        assert not listens_beyond_loopback(int(engine[1]))
        assert listens_beyond_loopback(int(address[1].rpartition(":")[2])), "--host=0.0.0.0"

        context = authority.context(mine)
        for key, status in ((made.key, 200), (single, 200), ("wrong", 401)):
            shown = {"authorization": f"Bearer {key}"}
            answer = httpx.get(
                f"{url[1]}/models", headers=shown, verify=context, timeout=PATIENCE_S
            )
            assert answer.status_code == status
        said = talk(address[1], authority.path, *mine, key=single)
        assert (said.returncode, said.stdout.strip()) == (0, "ruobrah"), said.stderr
        assert "API key" in talk(address[1], authority.path, *mine, key="").stderr
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_end() == 0, served.err
    assert single not in served.out + served.err
    assert made.key not in served.out + served.err


def listens_beyond_loopback(port: int) -> bool:
    """Whether somebody can reach `port` under an address of this machine that is not 127.0.0.1;
    127.0.0.2 stands for one, as whoever listens on all of them has it too."""
    with socket.socket() as probe:
        probe.settimeout(PATIENCE_S)
        return probe.connect_ex(("127.0.0.2", port)) == 0


def talk(
    address: str, ca: str, cert: str, own_key: str, *, key: str
) -> subprocess.CompletedProcess[str]:
    """`tidemill chat` over mTLS."""
    words = ("reverse: harbour", f"--server={address}", "--temperature=0", f"--tls-ca={ca}")
    return subprocess.run(
        [*TIDEMILL, "chat", *words, f"--tls-cert={cert}", f"--tls-key={own_key}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TIDEMILL_API_KEY": key},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_batch_is_asked_over_tls_with_a_key(tmp_path: Path) -> None:
    authority, made = Authority(tmp_path / "pki", "ca"), new_key("alice")
    server = authority.sign("server")
    (tmp_path / "keys").write_text(made.line)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    (tmp_path / "in.jsonl").write_text(json.dumps({**line, "body": {"prompt": "ROMEO:"}}))
    flags = (f"--tls-cert={server.cert}", f"--tls-key={server.key}")
    with serve(
        tmp_path, "demo", *flags, f"--api-keys-file={tmp_path / 'keys'}", *free_ports()
    ) as it:
        it.wait_ready()
        url = re.search(r"HTTP +(https://\S+)", it.out)
        assert url is not None
        done = subprocess.run(
            [*TIDEMILL, "run-batch", "-i", "in.jsonl", "-o", "out.jsonl", f"--url={url[1]}"],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "SSL_CERT_FILE": authority.path,
                "TIDEMILL_API_KEY": made.key,
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    (answer,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert answer["response"]["status_code"] == 200
