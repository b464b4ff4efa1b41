"""Addresses: what is taken, what it becomes, what is refused."""

from __future__ import annotations

import pytest

from gemmwire.errors import InvalidArgument
from gemmwire.url import Url, parse_url, segment


@pytest.mark.parametrize(
    ("text", "url", "authority"),
    [
        pytest.param("http://h", Url("http", "h", 80, ""), "h", id="default-port"),
        pytest.param("https://h", Url("https", "h", 443, ""), "h", id="default-tls-port"),
        pytest.param(
            "http://127.0.0.1:8000/", Url("http", "127.0.0.1", 8000, ""), "127.0.0.1:8000", id="port"
        ),
        pytest.param("https://h:80", Url("https", "h", 80, ""), "h:80", id="port-of-the-other-scheme"),
        pytest.param("HTTP://Host:80", Url("http", "host", 80, ""), "host", id="upper-case"),
        pytest.param("http://[::1]:8000", Url("http", "::1", 8000, ""), "[::1]:8000", id="ipv6"),
        pytest.param("http://h/a/b/", Url("http", "h", 80, "/a/b"), "h", id="prefix"),
        pytest.param("http://h/a%20b/\u00fc", Url("http", "h", 80, "/a%20b/%C3%BC"), "h", id="prefix-quoted"),
        pytest.param(
            "http://b\u00fccher.example", Url("http", "xn--bcher-kva.example", 80, ""), None, id="idna"
        ),
        pytest.param("http://h:0", Url("http", "h", 0, ""), "h:0", id="port-0"),
        pytest.param("unix:///a/s", Url("unix", "localhost", 0, "", "/a/s"), "localhost", id="unix"),
        pytest.param("unix:///a%20b", Url("unix", "localhost", 0, "", "/a b"), "localhost", id="unix-quoted"),
    ],
)
def test_an_address_is_taken_apart(text: str, url: Url, authority: str | None) -> None:
    """Guards: a Host header or a path that the server does not know as its own."""
    assert parse_url(text) == url
    assert url.authority == (authority or url.host)
    assert parse_url(str(url)) == url


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", "must start with http", id="empty"),
        pytest.param("127.0.0.1:8000", "must start with http", id="no-scheme"),
        pytest.param("localhost:8000", "must start with http", id="host-as-scheme"),
        pytest.param("ftp://h", "must start with http", id="ftp"),
        pytest.param("http://", "has no host", id="no-host"),
        pytest.param("http:///v2", "has no host", id="path-only"),
        pytest.param("http://h:port", "cannot be read", id="port-no-number"),
        pytest.param("http://h:65536", "cannot be read", id="port-too-large"),
        pytest.param("http://[::1", "cannot be read", id="ipv6-open"),
        pytest.param("http://a..b", "cannot be read", id="empty-label"),
        pytest.param("http://" + "a" * 64, "cannot be read", id="label-too-long"),
        pytest.param("http://h/?a=1", "query or fragment", id="query"),
        pytest.param("http://h/#a", "query or fragment", id="fragment"),
        pytest.param("http://h/a b", "without spaces", id="space"),
        pytest.param("http://h/\r\nX: 1", "without spaces or control", id="line-break"),
        pytest.param("unix://a/s", "absolute path", id="unix-relative"),
        pytest.param("unix:///", "absolute path", id="unix-root"),
        pytest.param("unix:///a%00b", "absolute path", id="unix-null"),
        pytest.param("unix:///a?b=1", "absolute path", id="unix-query"),
        pytest.param("http://h\t", "without spaces or control", id="tab"),
        pytest.param(None, "must be a string", id="none"),
        pytest.param(b"http://h", "must be a string", id="bytes"),
    ],
)
def test_an_address_that_is_none_is_refused(text: str, words: str) -> None:
    """Guards: an error at the first call, from the depths, for a typing error in the address."""
    with pytest.raises(InvalidArgument, match=words) as caught:
        parse_url(text)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("http://user:secret@h", "send credentials in a header", id="alone"),
        pytest.param("http://user:secret@h:99999", "cannot be read", id="port"),
        pytest.param("http://user:secret@h x", "without spaces", id="space"),
        pytest.param("ftp://user:secret@h", "must start with", id="scheme"),
        pytest.param("unix://user:secret@h/a", "absolute path", id="unix"),
    ],
)
def test_a_password_is_refused_and_not_repeated(text: str, words: str) -> None:
    """Guards: a password that is left out of the request, and one that stands in a log."""
    with pytest.raises(InvalidArgument, match=words) as caught:
        parse_url(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        pytest.param("demo.layers.0.attn.wq", "demo.layers.0.attn.wq", id="module-path"),
        pytest.param("a/b", "a%2Fb", id="slash"),
        pytest.param("a?b#c%d e", "a%3Fb%23c%25d%20e", id="reserved"),
        pytest.param("\u00fc", "%C3%BC", id="not-ascii"),
        pytest.param("a\r\nb", "a%0D%0Ab", id="line-break"),
        pytest.param("...", "...", id="three-dots"),
    ],
)
def test_a_name_is_one_segment(name: str, quoted: str) -> None:
    """Guards: a name that ends the path, or begins another header."""
    assert segment(name, "layer") == quoted


@pytest.mark.parametrize("name", ["", ".", "..", "\ud800", None, 3], ids=ascii)
def test_a_name_that_is_no_segment_is_refused(name: str) -> None:
    """Guards: `..`, which a proxy takes for the parent."""
    with pytest.raises(InvalidArgument, match=r"^layer is "):
        segment(name, "layer")
