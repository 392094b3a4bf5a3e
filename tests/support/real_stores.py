"""Object stores of others, started on loopback: moto and SeaweedFS (S3), azurite (Azure). `.ci/objects` installs and names them.

    python tests/support/real_stores.py BIN AZURITE -- COMMAND...

BIN is the folder with `moto_server`, `weed` and the Python that has boto3 and azure-storage-blob; AZURITE the program, or "" for none. The
command finds the address and the variables of each in `CKPT_TEST_STORES`.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ACCOUNT = "devstoreaccount1"  # azurite's own, which is public
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
IDENTITY = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "a-secret", "AWS_REGION": "us-east-1"}
BUCKETS = """
import sys
for url in sys.argv[1:-2]:
    import boto3
    boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket="bucket")
if sys.argv[-2]:
    from azure.storage.blob import BlobServiceClient
    BlobServiceClient(account_url=sys.argv[-2], credential=sys.argv[-1]).create_container("bucket")
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_for(port: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"nothing listens on port {port}")


def weed_ports() -> list[int]:
    """Four ports for SeaweedFS, which takes for each a second one, 10,000 above it."""
    found: list[int] = []
    while len(found) < 4:
        port = random.randrange(20_000, 30_000)
        with suppress(OSError):
            for one in (port, port + 10_000):
                socket.create_server(("127.0.0.1", one)).close()
            found.append(port)
    return found


def main(bin: Path, azurite: str, command: list[str]) -> int:
    folder = Path(tempfile.mkdtemp())
    (moto,) = free_ports(1)
    (azure,) = free_ports(1)
    master, volume, filer, s3 = weed_ports()
    config = {
        "identities": [
            {"name": "t", "credentials": [{"accessKey": "nobody", "secretKey": "a-secret"}], "actions": ["Admin", "Read", "Write", "List"]}
        ]
    }
    (folder / "s3.json").write_text(json.dumps(config))
    weed = [
        *(bin / "weed", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}"),
        *(f"-volume.port={volume}", "-filer=true", f"-filer.port={filer}", "-s3", f"-s3.port={s3}"),
        *(f"-s3.config={folder / 's3.json'}", "-volume.max=20", "-master.volumeSizeLimitMB=64"),
    ]
    commands: list[list[object]] = [[bin / "moto_server", "-H", "127.0.0.1", "-p", moto], list(weed)]
    if azurite:
        commands.append(
            [azurite, "--silent", "--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", azure, "--skipApiVersionCheck"]
        )
    with open(folder / "log", "wb") as log:
        servers = [subprocess.Popen(list(map(str, one)), stdout=log, stderr=log, cwd=folder) for one in commands]
    try:
        for port in (moto, s3, filer, *([azure] if azurite else [])):
            wait_for(port)
        time.sleep(5)  # SeaweedFS elects a master
        urls = [f"http://127.0.0.1:{moto}", f"http://127.0.0.1:{s3}"]
        account = f"http://127.0.0.1:{azure}/{ACCOUNT}" if azurite else ""
        keys = {**os.environ, **IDENTITY}
        subprocess.run([bin / "python", "-c", BUCKETS, *urls, account, KEY], check=True, env=keys)
        stores = [{"root": "s3://bucket", "environment": IDENTITY | {"AWS_ENDPOINT_URL": url}} for url in urls]
        if azurite:
            of_azure = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
            of_azure |= {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{azure}"}
            stores.append({"root": "az://bucket", "environment": of_azure})
        return subprocess.run(command, env=os.environ | {"CKPT_TEST_STORES": json.dumps(stores)}).returncode
    except BaseException:
        print((folder / "log").read_text(errors="replace")[-5000:], file=sys.stderr)
        raise
    finally:
        for one in servers:
            one.kill()


if __name__ == "__main__":
    at = sys.argv.index("--")
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2], sys.argv[at + 1 :]))
