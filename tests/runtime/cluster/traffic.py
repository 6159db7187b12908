"""TCP traffic between nodes, run inside them.

python traffic.py serve | ping ADDRESS COUNT | send ADDRESS BYTES FLOWS
"""

import json
import socket
import sys
import threading
import time

PORT = 5999


def serve() -> None:
    """Echo ("e") or swallow ("s" and 8 bytes of length, answered with "k"); says "up" once it listens."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("0.0.0.0", PORT))
    server.listen(8)
    sys.stdout.write("up\n")
    sys.stdout.flush()
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        if connection.recv(1) == b"e":
            while data := connection.recv(64):
                connection.sendall(data)
            return
        left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
        buffer = bytearray(1 << 20)
        while left > 0:
            left -= connection.recv_into(buffer) or left
        connection.sendall(b"k")


def ping(address: str, count: int) -> list[float]:
    """Round-trip times in seconds of 64 bytes, the first five left out."""
    times = []
    with socket.create_connection((address, PORT), timeout=2) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"e")
        for _ in range(count + 5):
            start = time.perf_counter()
            connection.sendall(b"x" * 64)
            connection.recv(64, socket.MSG_WAITALL)
            times.append(time.perf_counter() - start)
    return times[5:]


def send(address: str, num_bytes: int, flows: int) -> list[float]:
    """Seconds until the last byte of each flow was acknowledged by the server; all start together."""
    barrier = threading.Barrier(flows)
    times = [0.0] * flows

    def one(flow: int) -> None:
        with socket.create_connection((address, PORT), timeout=60) as connection:
            connection.sendall(b"s")
            barrier.wait()
            start = time.perf_counter()
            connection.sendall(num_bytes.to_bytes(8, "big"))
            connection.sendall(bytes(num_bytes))
            assert connection.recv(1) == b"k"
            times[flow] = time.perf_counter() - start

    threads = [threading.Thread(target=one, args=(flow,)) for flow in range(flows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "serve":
        serve()
    elif command == "ping":
        json.dump(ping(arguments[0], int(arguments[1])), sys.stdout)
    else:
        json.dump(send(arguments[0], int(arguments[1]), int(arguments[2])), sys.stdout)
