"""Addresses of peers (spec 1)."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_sidecar.endpoint import GrpcEndpoint, HttpEndpoint, ListenAddress
from trio_sidecar.errors import ErrorKind, InvalidConfig

PORTS = st.integers(1, 65535)
NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]([a-z0-9-]{0,9}[a-z0-9])?){0,3}", fullmatch=True)


@pytest.mark.rule("R1.2", "R1.3", "R1.4")
@pytest.mark.parametrize(
    ("text", "normal"),
    [
        (" 127.0.0.1:50051 ", "http://127.0.0.1:50051"),
        ("http://server:50051", "http://server:50051"),
        ("grpc://server:50051", "http://server:50051"),
        ("http://[2001:db8::1]:50051", "http://[2001:db8::1]:50051"),
        ("[2001:DB8:0::1]:50051", "http://[2001:db8::1]:50051"),
        ("http://server:50051/", "http://server:50051"),
        ("http://server:80", "http://server"),
        ("http://server", "http://server"),
        ("server", "http://server"),
        ("Server.Example:1", "http://server.example:1"),
        ("under_score:1", "http://under_score:1"),
        ("bücher:1", "http://xn--bcher-kva:1"),
        ("server:0080", "http://server"),
        ("[::ffff:1.2.3.4]:5", "http://[::ffff:1.2.3.4]:5"),
        ("[::1]", "http://[::1]"),
    ],
)
def test_grpc_endpoint_is_normalised(text: str, normal: str) -> None:
    """Scheme, host and port survive in one normal form, and nothing else does."""
    assert normal == str(GrpcEndpoint.parse(text))


def test_grpc_endpoint_keeps_host_and_port_apart() -> None:
    """The host has no brackets, for sockets; the authority has them, for requests."""
    endpoint = GrpcEndpoint.parse("[2001:db8::1]:50051")

    assert ("2001:db8::1", 50051, "[2001:db8::1]:50051") == (endpoint.host, endpoint.port, endpoint.authority)
    assert (80, "server") == (GrpcEndpoint.parse("server").port, GrpcEndpoint.parse("server:80").authority)


@pytest.mark.rule("R1.1", "R1.5")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is required"),
        (" ", "is required"),
        ("http://", "names no host"),
        ("grpc://", "names no host"),
        (":50051", "':50051' names no host"),
        ("http:///x", "only a plaintext scheme and authority"),
        ("https://server", "TLS"),
        ("grpcs://server", "TLS"),
        ("other://server", "unsupported endpoint scheme other://"),
        ("HTTP://server", "unsupported endpoint scheme HTTP://"),
        ("http://user:password@server:50051", "user information"),
        ("@server:1", "user information"),
        ("http://server:50051/path", "'http://server:50051…' must contain only a plaintext scheme and authority"),
        ("http://server:50051//", "only a plaintext scheme and authority"),
        ("http://server:50051?token=secret", "only a plaintext scheme and authority"),
        ("http://server:50051#fragment", "only a plaintext scheme and authority"),
        ("server\\x:1", "only a plaintext scheme and authority"),
        ("server:0", "port 0 is not allowed; ports are 1 to 65535"),
        ("server:65536", "port 65536 is not allowed"),
        ("server:+5", "port '+5' of 'server' is not a number"),
        ("server:", "port '' of 'server' is not a number"),
        ("unix:/tmp/x", "unix:///PATH"),
        ("server:٣", "is not a number"),
        ("server:" + "1" * 5000, "is not a number"),
        ("a b:1", "not a host name"),
        ("a..b:1", "not a host name"),
        ("-a:1", "not a host name"),
        ("exa%6Dple:1", "not a host name"),
        ("a" * 64 + ":1", "not a host name"),
        ("1.2:3", "dotted decimal"),
        ("0x7f.1:5", "dotted decimal"),
        ("256.0.0.1:5", "dotted decimal"),
        ("[::1", "[ADDRESS]:PORT"),
        ("[::1]5", "[ADDRESS]:PORT"),
        ("[::g]:1", "not an IPv6 address"),
    ],
)
def test_grpc_endpoint_refusals_name_the_argument(text: str, words: str) -> None:
    """What cannot be used is refused with the argument's name and the reason."""
    with pytest.raises(InvalidConfig) as caught:
        GrpcEndpoint.parse(text, "--test-endpoint")

    assert ("--test-endpoint", ErrorKind.INVALID_ARGUMENT) == (caught.value.setting, caught.value.kind)
    assert words in str(caught.value)


@pytest.mark.rule("FR-107")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("::1", "in brackets"),
        ("http://::1", "in brackets"),
        ("::1:50051", "in brackets"),
        ("fe80::1%eth0", "in brackets"),
        ("[fe80::1%eth0]:5", "zone"),
        ("http://[fe80::1%25eth0]:5", "zone"),
    ],
)
def test_ipv6_needs_brackets_and_no_zone(text: str, words: str) -> None:
    """An IPv6 address without brackets, or with a zone, is refused with a hint."""
    with pytest.raises(InvalidConfig, match=words):
        GrpcEndpoint.parse(text)


@pytest.mark.parametrize("secret", ["user:hunter2@h:1", "h:1/hunter2", "h:1?t=hunter2", "h:1#hunter2", "hunter2 x://h"])
def test_messages_do_not_repeat_secrets(secret: str) -> None:
    """User information, paths and queries stay out of messages."""
    with pytest.raises(InvalidConfig) as caught:
        GrpcEndpoint.parse("http://" + secret if "://" not in secret else secret)

    assert "hunter2" not in str(caught.value)


@given(
    host=NAMES | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(lambda address: f"[{address}]"), port=PORTS
)
def test_grpc_endpoint_round_trips(host: str, port: int) -> None:
    """The normalised text parses to the same endpoint."""
    endpoint = GrpcEndpoint.parse(f"{host}:{port}")

    assert endpoint == GrpcEndpoint.parse(str(endpoint))
    assert port == endpoint.port


@given(st.text(alphabet=string.printable + "ß٣\x00", max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """No text raises anything but the one error, for any of the three kinds of address."""
    for parse in (GrpcEndpoint.parse, HttpEndpoint.parse, ListenAddress.parse):
        try:
            parsed = parse(text)
        except InvalidConfig:
            continue
        assert parsed.host


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("http://worker:8120", "http://worker:8120/"),
        ("https://worker.example.com", "https://worker.example.com/"),
        ("https://worker.example.com/admin/v1", "https://worker.example.com/admin/v1"),
        ("HTTP://Worker:80/a", "http://worker/a"),
        ("https://[::1]:443", "https://[::1]/"),
        ("http://worker:443", "http://worker:443/"),
    ],
)
def test_http_endpoint_keeps_its_path(text: str, normal: str) -> None:
    """Scheme, host, port and path prefix survive; a scheme's own port goes."""
    assert normal == str(HttpEndpoint.parse(text))


@pytest.mark.rule("R2.10")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is required"),
        ("worker:8120", "http://"),
        ("grpc://worker:8120", "http://"),
        ("https:///admin", "no host"),
        ("HTTP:///admin", "no host"),
        ("https://user:token@worker.example.com/admin", "user information"),
        ("https://worker.example.com/admin?token=secret", "query"),
        ("https://worker.example.com/admin#fragment", "fragment"),
        ("http://worker/a b", "spaces"),
        ("http://worker/a\\b", "only"),
        ("http://worker:0/", "port 0"),
    ],
)
def test_http_endpoint_refusals(text: str, words: str) -> None:
    """What is no HTTP base URL is refused, naming the flag and never the secret."""
    with pytest.raises(InvalidConfig) as caught:
        HttpEndpoint.parse(text)

    assert "--vllm-http-endpoint" == caught.value.setting
    assert words in str(caught.value) or "backslashes" in str(caught.value)
    assert "token" not in str(caught.value)


@pytest.mark.rule("R1.6", "R1.7")
@pytest.mark.parametrize(
    ("grpc", "path", "url"),
    [
        ("http://server:30001", "/", "http://server:30000/"),
        ("http://server:30001", "/generate", "http://server:30000/generate"),
        ("http://[2001:db8::1]:30001", "/", "http://[2001:db8::1]:30000/"),
    ],
)
def test_http_endpoint_derives_from_grpc(grpc: str, path: str, url: str) -> None:
    """The host is kept, the port replaced."""
    assert url == str(GrpcEndpoint.parse(grpc).http(30000, path))


@pytest.mark.rule("R1.8")
@pytest.mark.parametrize("port", [0, -1, 65536])
def test_derived_port_must_be_a_port(port: int) -> None:
    """Port 0 and ports out of range are refused."""
    with pytest.raises(InvalidConfig, match="ports are 1 to 65535"):
        GrpcEndpoint.parse("server:1").http(port)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("[::]:50051", "::", 50051), (" localhost:1 ", "localhost", 1)],
)
def test_listen_address_may_be_port_zero(text: str, host: str, port: int) -> None:
    """A server may leave the port to the system; the text comes back as it was."""
    address = ListenAddress.parse(text)

    assert (host, port, text.strip()) == (address.host, address.port, str(address))


@pytest.mark.parametrize(
    ("text", "words"), [("host", "names no port"), (":5", "no host"), ("h:65536", "0 to 65535"), ("::1:5", "brackets")]
)
def test_listen_address_refusals(text: str, words: str) -> None:
    """Host and port are both needed."""
    with pytest.raises(InvalidConfig, match=words):
        ListenAddress.parse(text)
