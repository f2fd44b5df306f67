"""The NATS server's configuration, and finding its binary."""

import subprocess

import pytest

from persia.errors import InvalidArgumentError
from persia.launcher.nats_server import find_nats_server, nats_config, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("64MB", 64 << 20), ("512 kb", 512 << 10), ("1GB", 1 << 30), (" 1048576 ", 1 << 20)],
)
def test_sizes(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MB", "0", "-1MB", "1.5MB", "64MiB", "2GB", "64MB; jetstream"])
def test_bad_sizes_are_refused(text):
    with pytest.raises(InvalidArgumentError, match="64MB"):
        parse_size(text)


def test_the_server_accepts_the_configuration(tmp_path):
    config = tmp_path / "nats.conf"
    config.write_text(
        nats_config(host="127.0.0.1", port=0, max_payload_bytes=64 << 20, ports_folder=tmp_path)
    )
    result = subprocess.run(
        [find_nats_server(), "-t", "-c", str(config)], capture_output=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
