"""Measure `kge-torchrec serve`: latencies of many clients, also while half-sent requests wait.

kge-torchrec serve RUN --port 8000
python scripts/bench_server.py --port 8000 --query '/recommend?head=u1&relation=visits&k=20'
python scripts/bench_server.py --port 8000 --query ... --half-sent 1150
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import time
from collections import Counter
from typing import Any


async def ask(port: int, query: str, count: int, seconds: list[float], codes: Counter) -> None:
    """Send requests one after another over one connection; note latencies and status codes."""
    request = f"GET {query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    reader: Any = None
    writer: Any = None
    for _ in range(count):
        start = time.perf_counter()
        try:
            if writer is None or writer.is_closing():
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            await reader.readexactly(int(fields[b"content-length"]))
            codes[int(head.split()[1])] += 1
            if fields.get(b"connection") == b"close":
                writer.close()
        except (OSError, asyncio.IncompleteReadError, TimeoutError, asyncio.TimeoutError) as error:
            codes[type(error).__name__] += 1
            writer = None
            await asyncio.sleep(0.1)
        seconds.append(time.perf_counter() - start)


async def half_sent(
    port: int, count: int
) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open connections that send the beginning of a request and no more."""
    opened = []
    for number in range(count):
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 5)
        except (OSError, asyncio.TimeoutError) as error:
            print(f"connection {number}: {error!r}")
            break
        writer.write(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        opened.append((reader, writer))
    return opened


async def main(args: argparse.Namespace) -> None:
    waiting = await half_sent(args.port, args.half_sent)
    seconds: list[float] = []
    codes: Counter = Counter()
    start = time.perf_counter()
    queries = args.port, args.query, args.requests, seconds, codes
    await asyncio.gather(*(ask(*queries) for _ in range(args.clients)))
    wall = time.perf_counter() - start
    seconds.sort()
    p50, p99 = (1e3 * seconds[int(len(seconds) * share)] for share in (0.5, 0.99))
    print(
        f"{args.clients} clients beside {len(waiting)} half-sent requests: p50 {p50:.0f} ms, "
        f"p99 {p99:.0f} ms, {len(seconds) / wall:.0f} requests/s, replies {dict(codes)}"
    )
    if waiting:
        await asyncio.sleep(args.wait)
        ended = sum(reader.at_eof() for reader, _ in waiting)
        print(f"after {args.wait:.0f} s more the server has ended {ended} of {len(waiting)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--query", required=True, help="path and query of the requests")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--requests", type=int, default=40, help="per client")
    parser.add_argument("--half-sent", type=int, default=0)
    parser.add_argument("--wait", type=float, default=12)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(main(parser.parse_args()))
