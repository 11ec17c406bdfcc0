"""TLS between KV endpoints: both sides show the certificate that follows from the cluster's keys, and take no other.

There is no authority to run and nothing to hand out: whoever has the cluster file's key pair can make the certificate,
and proves by its handshake that it has the secret half. Certificate and key are the same on every host.
"""

import os
import ssl
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

_PURPOSE = b"polyphase kv tls 1"
_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "polyphase-kv")])
_FROM, _UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)


class TlsContexts:
    """What the two sides of connections are made with."""

    def __init__(self, curve: tuple[str, str]) -> None:
        """`curve` is the cluster's pair (public, secret; Z85). Raises ValueError for what is none."""
        key, certificate = identity(curve)
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, key, certificate)
        self.server.num_tickets = 0  # no session is resumed
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, key, certificate)


def identity(curve: tuple[str, str]) -> tuple[bytes, bytes]:
    """Key and certificate (PEM) that follow from a pair: from the same pair always the same. Raises ValueError."""
    public, secret = (z85.decode(half) for half in curve)
    if len(public) != 32 or len(secret) != 32:
        raise ValueError("a CurveZMQ pair has two keys of 40 characters")
    key = Ed25519PrivateKey.from_private_bytes(HKDF(hashes.SHA256(), 32, public, _PURPOSE).derive(secret))
    certificate = (
        x509.CertificateBuilder(_NAME, _NAME, key.public_key(), 1, _FROM, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, None)
    )
    pem = serialization.Encoding.PEM
    secret_pem = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return secret_pem, certificate.public_bytes(pem)


def _context(protocol: int, key: bytes, certificate: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # who a peer is follows from its certificate
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    file = os.memfd_create("polyphase-kv")  # Python's ssl takes files only; this one is in memory
    try:
        os.write(file, key + certificate)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
