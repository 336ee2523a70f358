"""How messages of the control plane get on: news to everyone, others towards their receivers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

from taktline.transport.control_links import Links, nearest
from taktline.transport.control_messages import Item, Routed, encode, encode_news
from taktline.transport.control_news import News

_KEPT = 256
"""How many messages are kept that a neighbour was to pass on."""


class Routes:
    """What one process passes on; used on the control thread.

    Args:
        process: the number of this process, of ``size``.
        links: the sockets to its neighbours.
        news: who has come, who is gone, and who was heard of just now.
        deliver: called with each message for this process.
    """

    def __init__(
        self,
        process: int,
        size: int,
        links: Links,
        news: News,
        deliver: Callable[[Routed], None],
    ) -> None:
        self._process, self._size = process, size
        self._links, self._news, self._deliver = links, news, deliver
        self._fresh: list[tuple[Item, int]] = []
        """News to pass on, and who has told them."""
        self._come = 0
        """The processes whose coming is to be passed on, as bits."""
        self._passed: defaultdict[int, deque[Routed]] = defaultdict(lambda: deque(maxlen=_KEPT))
        """What each neighbour was to pass on."""
        self._held: list[Routed] = []
        """Messages for which there is no way at the moment."""

    def add(self, item: Item, source: int) -> None:
        """Pass on news at the next :meth:`spread`, but not to the process that has told them."""
        self._fresh.append((item, source))

    def add_come(self, come: int) -> None:
        """Pass on that processes have come: all of them as one item, since there may be many."""
        self._come |= come

    def spread(self) -> None:
        """Pass on the news that have come since the last time."""
        fresh, self._fresh = self._fresh, []
        if self._come:
            fresh.insert(0, (("here", f"{self._come:x}"), self._process))
            self._come = 0
        if not fresh:
            return
        sources = {source for _, source in fresh}
        everything = encode_news([item for item, _ in fresh])
        for process in self._links.connected:
            data = everything
            if process in sources:
                data = encode_news([item for item, source in fresh if source != process])
            if data:
                self._links.write(process, data)

    def route(self, message: Routed) -> None:
        """Take a message for this process, and pass it on to others; who has not come gets it then.

        News come first: a message must not overtake those that were told before it.
        """
        self.spread()
        ways: defaultdict[int, list[int]] = defaultdict(list)
        connected = self._links.connected
        near = [process for process in connected if self._news.lives(process)]
        for target in message.to:
            if target == self._process:
                self._deliver(message)
            elif target in self._news.here and target not in self._news.gone:
                is_near = target in connected
                way = target if is_near else nearest(target, near, self._process, self._size)
                if way is None:
                    self._held.append(replace(message, to=[target]))
                else:
                    ways[way].append(target)
        for way, targets in ways.items():
            part = replace(message, to=targets)
            self._passed[way].append(part)
            self._links.write(way, encode("routed", part))

    def retry(self) -> None:
        """Pass on the messages for which there was no way."""
        held, self._held = self._held, []
        for message in held:
            self.route(message)

    def repeat(self, process: int) -> None:
        """Send a neighbour again what may have been lost with the socket before this one."""
        for message in list(self._passed[process]):
            self._links.write(process, encode("routed", message))

    def avoid(self, process: int) -> None:
        """Send by another way what a process that is gone may not have passed on."""
        for message in self._passed.pop(process, ()):
            self.route(message)
