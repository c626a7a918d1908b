"""One client of etcd at work: `python etcd_worker.py CLIENT HOST PORT OPERATIONS` prints milliseconds as JSON.

get, put: of one operation after the other. get_8: of one operation, while eight are under way at a time. watch: from
before a put until the watch of the same key has told of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

KEY, VALUE = "benchmark/key", "x" * 200
CONCURRENCY = 8


def timed(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each call; the first tenth is warming up."""
    spent = []
    for _ in range(count + count // 10):
        begun = time.perf_counter()
        call()
        spent.append(1e3 * (time.perf_counter() - begun))
    return spent[count // 10 :]


async def timed_async(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    spent = []
    for _ in range(count + count // 10):
        begun = time.perf_counter()
        await call()
        spent.append(1e3 * (time.perf_counter() - begun))
    return spent[count // 10 :]


def threads(get: Callable[[], object], put: Callable[[], object], count: int, seen: threading.Event) -> dict[str, list]:
    """Of a client that blocks; `seen` is set when its watch tells of a change."""
    result = {"put": timed(put, count), "get": timed(get, count)}
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(lambda _: get(), range(count)))
        begun = time.perf_counter()
        list(pool.map(lambda _: get(), range(count)))
        result["get_8"] = [1e3 * (time.perf_counter() - begun) / count]

    def watched() -> None:
        seen.clear()
        put()
        assert seen.wait(10), "the watch did not tell"

    time.sleep(0.3)
    result["watch"] = timed(watched, count // 3)
    return result


async def loop(
    get: Callable[[], Awaitable[object]], put: Callable[[], Awaitable[object]], count: int, seen: asyncio.Event
) -> dict[str, list]:
    """Of a client for asyncio."""
    result = {"put": await timed_async(put, count), "get": await timed_async(get, count)}
    limit = asyncio.Semaphore(CONCURRENCY)

    async def limited() -> None:
        async with limit:
            await get()

    await asyncio.gather(*(limited() for _ in range(count)))
    begun = time.perf_counter()
    await asyncio.gather(*(limited() for _ in range(count)))
    result["get_8"] = [1e3 * (time.perf_counter() - begun) / count]

    async def watched() -> None:
        seen.clear()
        await put()
        await asyncio.wait_for(seen.wait(), 10)

    await asyncio.sleep(0.3)
    result["watch"] = await timed_async(watched, count // 3)
    return result


def elastic_harness(host: str, port: int, count: int) -> dict[str, list]:
    from elastic_harness.etcd.address import Address
    from elastic_harness.etcd.gateway import Gateway
    from elastic_harness.etcd.store import EtcdStore
    from elastic_harness.membership.store import Put

    seen = threading.Event()
    store = EtcdStore(Gateway(Address((f"http://{host}:{port}",))), wake=seen.set)
    watch = store.watch(KEY, store.revision + 1)
    try:
        return threads(lambda: store.get(KEY), lambda: store.txn({}, [Put(KEY, VALUE)]), count, seen)
    finally:
        watch.close()


def etcd3gw(host: str, port: int, count: int) -> dict[str, list]:
    import etcd3gw as package

    client = package.client(host=host, port=port)
    client.put(KEY, VALUE)
    seen = threading.Event()
    events, cancel = client.watch(KEY)

    def follow() -> None:
        for _ in events:
            seen.set()

    threading.Thread(target=follow, daemon=True).start()
    try:
        return threads(lambda: client.get(KEY), lambda: client.put(KEY, VALUE), count, seen)
    finally:
        cancel()


def etcd_sdk_python(host: str, port: int, count: int) -> dict[str, list]:
    import pyetcd

    client = pyetcd.client(host=host, port=port)
    seen = threading.Event()
    client.add_watch_callback(KEY, lambda _: seen.set())
    return threads(lambda: client.get(KEY), lambda: client.put(KEY, VALUE), count, seen)


async def aetcd(host: str, port: int, count: int) -> dict[str, list]:
    import aetcd as package

    async with package.Client(host, port) as client:
        await client.put(KEY.encode(), VALUE.encode())
        seen = asyncio.Event()

        async def follow() -> None:
            async for _ in await client.watch(KEY.encode()):
                seen.set()

        following = asyncio.create_task(follow())
        try:
            key, value = KEY.encode(), VALUE.encode()
            return await loop(lambda: client.get(key), lambda: client.put(key, value), count, seen)
        finally:
            following.cancel()


async def etcd_client_py(host: str, port: int, count: int) -> dict[str, list]:
    from etcd_client import Client

    async with Client([f"http://{host}:{port}"]).connect() as client:
        key, value = KEY.encode(), VALUE.encode()
        await client.put(key, value)
        seen = asyncio.Event()

        async def follow() -> None:
            async for _ in client.watch(key):
                seen.set()

        following = asyncio.create_task(follow())
        try:
            return await loop(lambda: client.get(key), lambda: client.put(key, value), count, seen)
        finally:
            following.cancel()


CLIENTS = {
    "elastic_harness": elastic_harness,
    "etcd3gw": etcd3gw,
    "etcd-sdk-python": etcd_sdk_python,
    "aetcd": aetcd,
    "etcd-client-py": etcd_client_py,
}


def main() -> None:
    name, host, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    told = CLIENTS[name](host, port, count)
    print(json.dumps(asyncio.run(told) if asyncio.iscoroutine(told) else told), flush=True)


if __name__ == "__main__":
    main()
