"""A watcher that counts its work in shared memory: `main(descriptor)`, where descriptor is of a memory of one page.

Runs as the program of detached.py, without numpy. The numbers are in the order of FIELDS, as 64-bit floats.
"""

import mmap
import selectors
import time

# Messages and bytes on the connections between watchers and to monitors; turns of the event loop; the most CPU seconds
# of one turn.
FIELDS = ("sent", "sent_bytes", "received", "received_bytes", "turns", "longest_turn_s")


def main(descriptor: int) -> None:
    """Run a watcher, as allred.watch.process.main."""
    counts = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("d")
    sent, sent_bytes, received, received_bytes, turns, longest = range(len(FIELDS))

    class CountingSelector(selectors.DefaultSelector):
        def select(self, timeout=None):
            counts[turns] += 1
            counts[longest] = max(counts[longest], time.thread_time() - self.began if self.began else 0.0)
            found = super().select(timeout)
            self.began = time.thread_time()
            return found

        began = 0.0

    selectors.DefaultSelector = CountingSelector
    from allred.runtime import channel
    from allred.watch import process

    send_line, receive_lines = channel.Channel.send_line, channel.Channel.receive_lines

    def counted_send(self, line):
        counts[sent] += 1
        counts[sent_bytes] += len(line) + 1
        send_line(self, line)

    def counted_receive(self):
        lines = receive_lines(self)
        counts[received] += len(lines)
        counts[received_bytes] += sum(len(line) + 1 for line in lines)
        return lines

    channel.Channel.send_line, channel.Channel.receive_lines = counted_send, counted_receive
    process.main()
