"""TLS keys in files that only their owner can read.

Sessions get the paths, so no key is in code, command lines, environments or logs.
"""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from distributed.security import Security

from dask_cml.private_files import make_folder, owner_only

_FOLDER = "keys"
#: More than the clocks of two sessions can differ, and more than a cluster can run.
_CLOCKS_DIFFER, _VALID = timedelta(days=1), timedelta(days=365)
_FIELDS = (
    "tls_ca_file",
    "tls_client_cert",
    "tls_client_key",
    "tls_scheduler_cert",
    "tls_scheduler_key",
    "tls_worker_cert",
    "tls_worker_key",
)


def as_files(security: bool | Security, folder: Path) -> tuple[Security | None, dict[Path, str]]:
    """Return the security of a cluster with every key in a file, and the files to write.

    Parameters
    ----------
    security : bool or Security
        True: new keys for this cluster only. A Security: its keys.
    folder : Path
        The cluster's folder on the project file system.

    Raises
    ------
    ValueError
        If a Security lacks keys that the scheduler, the workers or clients need.
    OSError
        If a certificate's file cannot be read.
    """
    if not security:
        return None, {}
    given = _new_keys() if security is True else security
    given = _with_keys_of_certificates(given)
    missing = [field for field in _FIELDS if getattr(given, field) is None]
    if missing:
        raise ValueError(f"invalid security={given!r}: expected a Security with {', '.join(missing)}")
    result = copy.copy(given)
    files = {}
    for field in _FIELDS:
        value = getattr(given, field)
        if "-----BEGIN" in value:
            path = folder / _FOLDER / f"{field}.pem"
            files[path] = value
            setattr(result, field, str(path))
        else:
            setattr(result, field, os.path.abspath(value))
    result.require_encryption = True
    return result, files


def _with_keys_of_certificates(security: Security) -> Security:
    """Return a copy that takes missing keys from the file or the text of their certificates."""
    result = copy.copy(security)
    for role in ("client", "scheduler", "worker"):
        certificate = getattr(security, f"tls_{role}_cert")
        if certificate is not None and getattr(security, f"tls_{role}_key") is None:
            text = certificate if "-----BEGIN" in certificate else Path(certificate).read_text()
            if "PRIVATE KEY-----" in text:
                setattr(result, f"tls_{role}_key", certificate)
    return result


def _new_keys() -> Security:
    """Return the same as `Security.temporary`, but with elliptic curves, a hundred times faster than RSA."""
    # Imported here, because managers that rebuild a cluster need none of it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dask-cml")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM).decode()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return Security(**{field: private if field.endswith("_key") else public for field in _FIELDS})


def write(files: Mapping[Path, str]) -> None:
    """Write key files that only their owner can read."""
    for path, content in files.items():
        make_folder(path.parent)
        with open(path, "w", opener=owner_only) as file:
            file.write(content)


def paths(security: Security | None) -> dict[str, str] | None:
    """Return the paths of the keys, for the cluster's record."""
    return None if security is None else {field: getattr(security, field) for field in _FIELDS}


def connection_args(security: Security | None) -> dict[str, Any]:
    """Return the arguments for a connection to the scheduler. Reads the key files.

    Raises
    ------
    OSError
        If a key file is missing or not a regular file: reading a pipe would never end.
    """
    security = security or Security()
    for key in security.get_tls_config_for_role("client").values():
        if isinstance(key, str) and "-----BEGIN" not in key and not os.path.isfile(key):
            raise FileNotFoundError(errno.ENOENT, "not a regular file", key)
    return security.get_connection_args("client")


def arguments(security: Security | None, role: str) -> list[str]:
    """Return the command-line arguments of ``dask scheduler`` or ``dask worker``."""
    if security is None:
        return []
    tls = security.get_tls_config_for_role(role)
    return ["--protocol", "tls"] + [
        part
        for field in ("ca_file", "cert", "key")
        for part in (f"--tls-{field.replace('_', '-')}", tls[field])
    ]
