"""TLS keys in files that only their owner can read.

Sessions get the paths, so no key is in code, command lines, environments or logs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from distributed.security import Security

from dask_cml.errors import reason_of
from dask_cml.private_files import make_folder, read_file, regular

_FOLDER = "keys"
#: What the text of a key contains, and a path does not.
_PEM = "-----BEGIN"
_ROLES = ("client", "scheduler", "worker")
_CLOCKS_DIFFER, _VALID = timedelta(hours=1), timedelta(days=365)
_FIELDS = ("tls_ca_file", *(f"tls_{role}_{part}" for role in _ROLES for part in ("cert", "key")))


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
        If a Security lacks keys that the scheduler, the workers or clients need, or a file has none.
    """
    if not security:
        return None, {}
    original = _new_keys() if security is True else security
    values: dict[str, Any] = {field: _usable(field, getattr(original, field)) for field in _FIELDS}
    for role in _ROLES:
        if values[f"tls_{role}_key"] is None:
            values[f"tls_{role}_key"] = _with_key(values[f"tls_{role}_cert"])
    if missing := [field for field, value in values.items() if value is None]:
        raise ValueError(f"invalid security={original!r}: expected a Security with {', '.join(missing)}")
    result, files = copy.copy(original), {}
    for field, value in values.items():
        path = Path(value)
        if _PEM in value:
            path = folder / _FOLDER / f"{field}.pem"
            files[path] = value
        setattr(result, field, str(path))
    result.require_encryption = True
    return result, files


def _new_keys() -> Security:
    """Return new keys, which are valid since an hour ago: the clocks of nodes differ.

    Those of :meth:`Security.temporary` are valid from now on.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())  # an RSA key takes forty times as long
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dask-internal")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("dask-internal")]), critical=False)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    key_text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    # One key for all roles: Dask accepts the certificate of any role, and one folder holds all keys.
    certificate_text = certificate.public_bytes(serialization.Encoding.PEM).decode()
    keys = {f"tls_{role}_key": key_text for role in _ROLES}
    certificates = {f"tls_{role}_cert": certificate_text for role in _ROLES}
    return Security(require_encryption=True, tls_ca_file=certificate_text, **keys, **certificates)


def _usable(field: str, value: str | None) -> str | None:
    """Return a key's text, or the absolute path of its file, which has keys. Sessions would fail without."""
    if value is None or _PEM in value:
        return value
    path = Path(os.path.abspath(os.path.expandvars(os.path.expanduser(value))))
    try:
        if _PEM in read_file(path.resolve()).decode(errors="replace"):
            return str(path)
        why = "no PEM file"
    except (OSError, ValueError) as error:
        why = reason_of(error)
    words = f"a Security whose {field} is a PEM file or its text, got {str(path)!r} ({why})"
    raise ValueError(f"invalid security: expected {words}")


def _with_key(certificate: str | None) -> str | None:
    """Return the file or the text of a certificate if it contains the key, too."""
    if certificate is None:
        return None
    text = certificate if _PEM in certificate else Path(certificate).read_text(errors="replace")
    return certificate if "PRIVATE KEY-----" in text else None


def write(files: Mapping[Path, str]) -> None:
    """Write key files that only their owner can read."""
    for path, content in files.items():
        make_folder(path.parent)
        with open(path, "w", opener=regular) as file:
            file.write(content)


def paths(security: Security | None) -> dict[str, str] | None:
    """Return the paths of the keys, for the cluster's record."""
    return None if security is None else {field: getattr(security, field) for field in _FIELDS}
