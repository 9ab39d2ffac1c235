"""One small page from an engine, over HTTP: bounded in time and size, and whatever is wrong with it an exception."""

from __future__ import annotations

import aiohttp


class FetchError(Exception):
    """The engine answered, but not with a page we take."""


def client(timeout: float, accept: str, *, verify: bool, idle: float = 0.0) -> aiohttp.ClientSession:
    """At most one connection an engine, kept for `idle` seconds between two pages (0 = not at all). No cookies, no
    proxy from the environment; `timeout` is in seconds, for all of a page."""
    connection = {"keepalive_timeout": idle} if idle else {"force_close": True}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=1, ssl=verify, **connection),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=timeout),
        headers={"Accept": accept, "Accept-Encoding": "identity"},
        auto_decompress=False,  # nobody was asked to compress, and a small answer must not become a huge one
    )


async def fetch(session: aiohttp.ClientSession, url: str, max_bytes: int) -> bytes:
    """Raises `FetchError`, `aiohttp.ClientError` or `TimeoutError`."""
    async with session.get(url, allow_redirects=False) as response:
        if response.status != 200:
            raise FetchError(f"status {response.status}")
        return await _at_most(response.content, max_bytes)


def found_nobody(error: Exception) -> bool:
    """Was there nothing that takes connections? A certificate that is refused is somebody's."""
    return isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError)


async def _at_most(stream: aiohttp.StreamReader, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in stream.iter_any():
        size += len(part)
        if size > limit:
            raise FetchError(f"a page of more than {limit} bytes")
        parts.append(part)
    return b"".join(parts)
