"""A slow network between the hosts of `benchmarks.hosts`, for kernels without netem: a switch of our own, which holds
every packet for a while and loses some. Each host's address moves to a TUN device whose packets pass through it."""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import ipaddress
import os
import random
import select
import struct
import subprocess
import threading
import time
from types import TracebackType

from benchmarks.hosts import Network

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class SlowLink:
    """While this is entered, each packet between two hosts, or a host and this machine, takes `delay_s`, and of so many
    as `loss` says one is lost."""

    def __init__(self, network: Network, delay_s: float, loss: float) -> None:
        self._network = network
        self._delay_s = delay_s
        self._loss = loss
        self._random = random.Random(1)
        self._devices: dict[int, int] = {}  # by the address, as a number
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._switch, name="slow-link")
        self._error: BaseException | None = None

    def __enter__(self) -> SlowLink:
        thread = threading.Thread(target=self._open_all)  # of its own: it goes through all namespaces
        thread.start()
        thread.join()
        if self._error is not None:
            self._close()
            raise self._error
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for device in self._devices.values():
            os.close(device)  # and with it the interface is gone

    def _open_all(self) -> None:
        try:
            self._open(self._network.machine.address, None, self._network.bridge)
            for host in self._network.hosts:
                self._open(host.address, host.name, "eth0")
        except BaseException as error:  # thread boundary
            self._error = error

    def _open(self, address: str, namespace: str | None, interface: str) -> None:
        """Make the device of one host, and give it the host's address."""
        if namespace is not None:
            with open(f"/var/run/netns/{namespace}") as file:
                if _LIBC.setns(file.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._devices[int(ipaddress.ip_address(address))] = device
        name = f"{self._network.bridge}t"
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
        where = [] if namespace is None else ["-n", namespace]
        for command in (
            ["addr", "del", f"{address}/24", "dev", interface],
            ["addr", "add", f"{address}/24", "dev", name],
            ["link", "set", name, "up"],
        ):
            subprocess.run(["ip", *where, *command], check=True)

    def _switch(self) -> None:
        waiting: list[tuple[float, int, bytes]] = []
        count = 0
        poll = select.poll()
        for device in self._devices.values():
            poll.register(device, select.POLLIN)
        while not self._ending.is_set():
            due_s = waiting[0][0] - time.monotonic() if waiting else 0.1
            for device, _ in poll.poll(max(0.0, min(due_s, 0.1)) * 1e3):
                try:
                    packet = os.read(device, 1 << 16)
                except OSError:
                    continue
                if packet[0] >> 4 == 4 and self._random.random() >= self._loss:
                    count += 1
                    heapq.heappush(waiting, (time.monotonic() + self._delay_s, count, packet))
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                packet = heapq.heappop(waiting)[2]
                target = self._devices.get(int.from_bytes(packet[16:20], "big"))
                if target is not None:
                    try:
                        os.write(target, packet)
                    except OSError:
                        continue  # as if it were lost
