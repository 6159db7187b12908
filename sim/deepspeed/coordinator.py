"""DeepSpeed's parameter coordinator, replayed on counters: which weights each hook gathers, keeps and drops.

Facts: DeepSpeed's `partitioned_param_coordinator.py` and `parameter_offload.py` (first ZeRO++ release, June
2023; the same today but for the node copy, which the engine knows about). Only the steady state is replayed:
the trace of calls is complete, as it is from the third iteration on.
"""

from dataclasses import dataclass

from ...conf.schema import DeepSpeedConf
from .modules import Network, Visit

_NEVER = -1
Places = tuple[int, ...]  # in `Network.parameters`


@dataclass(frozen=True, slots=True)
class Stop:
    """What the hooks around one call do, in this order.

    `fetched` are gathered because the call needs them now, `awaited` are those that the call needs and that are
    on their way (`fetched` among them), `prefetched` are gathered for later calls, `released` are dropped
    after the call.
    """

    visit: Visit
    fetched: Places
    awaited: Places
    prefetched: Places
    released: Places


class Coordinator:
    """State from one micro-batch to the next.

    Limits count elements, as DeepSpeed's keys do. A tensor of at most `stage3_param_persistence_threshold` is
    persistent: no hook gathers or drops it, it is dropped and gathered again around the optimizer step only.
    """

    def __init__(self, network: Network, conf: DeepSpeedConf) -> None:
        self._conf = conf
        self._numel = [parameter.numel for parameter in network.parameters]
        threshold = conf.stage3_param_persistence_threshold
        self.persistent = tuple(at for at, numel in enumerate(self._numel) if numel <= threshold)
        self._there = [False] * len(self._numel)
        self._calls = self._trace(network)
        # the uses that hooks take from the queue, as (parameter, call); persistent ones make no difference there
        self._queue = [(at, step) for step, call in enumerate(self._calls) for at in call[1]]

    def _trace(self, network: Network) -> list[tuple[Visit, Places, Places]]:
        """Each visit, what of its module is not persistent, and those of it that are used again too late to stay.

        A weight stays if its next use begins within `stage3_max_reuse_distance` elements of modules called.
        """
        conf, numel = self._conf, self._numel
        small = set(self.persistent)
        large = {
            id(v.module): tuple([at for at in v.module.holds if at not in small]) for v in network.visits
        }
        size = {id(v.module): sum([numel[at] for at in v.module.holds]) for v in network.visits}
        ends = [0]  # elements called up to the end of each visit
        for visit in network.visits:
            ends.append(ends[-1] + size[id(visit.module)])
        following = [_NEVER] * len(numel)
        calls = []
        for step in range(len(network.visits) - 1, -1, -1):
            visit = network.visits[step]
            holds = large[id(visit.module)]
            reach = ends[step + 1] + conf.stage3_max_reuse_distance
            late = [at for at in holds if following[at] == _NEVER or ends[following[at]] >= reach]
            calls.append((visit, holds, tuple(late)))
            for at in holds:
                following[at] = step
        calls.reverse()
        return calls

    def weights_stepped(self) -> None:
        """The optimizer has run: what is gathered is dropped."""
        self._there = [False] * len(self._numel)

    def micro_batch(self, num_visits: int | None = None) -> tuple[Stop, ...]:
        """Forward, recomputation and backward, or only the first `num_visits` calls of them."""
        numel, there, queue = self._numel, self._there, self._queue
        bucket, most = self._conf.stage3_prefetch_bucket_size, self._conf.stage3_max_live_parameters
        queued, length = 0, len(queue)
        seen = [_NEVER] * len(numel)  # last use of each that has left the queue
        live = 0  # what an earlier micro-batch left gathered is not counted, as DeepSpeed resets its count
        flying: set[int] = set()
        stops = []
        for step, (visit, holds, late) in enumerate(self._calls[:num_visits]):
            fetched: Places = ()
            awaited: Places = ()
            prefetched: Places = ()
            released: Places = ()
            if holds:
                fetched = tuple([at for at in holds if not there[at]])
                awaited = (*[at for at in holds if at in flying], *fetched)
                flying.difference_update(awaited)
                for at in fetched:
                    there[at] = True
                    live += numel[at]
                # uses of this call leave the queue, unless an earlier prefetch took them from it
                expected = sum([seen[at] < step for at in holds])
                popped: set[int] = set()
                while queued < length and len(popped) < expected:
                    at, use = queue[queued]
                    queued += 1
                    seen[at] = use
                    popped.add(at)
            room = min(most - live, bucket)
            if room > 0:
                chosen: list[int] = []
                ahead = 0
                while queued < length and ahead < room:
                    at, use = queue[queued]
                    queued += 1
                    seen[at] = max(seen[at], use)
                    if not there[at]:
                        there[at] = True
                        chosen.append(at)
                        ahead += numel[at]
                live += ahead
                flying.update(chosen)
                prefetched = tuple(chosen)
            if late:  # a use that a prefetch has skipped because the weight was there keeps it
                released = tuple([at for at in late if seen[at] <= step + 1])
                for at in released:
                    there[at] = False
                    live -= numel[at]
            stops.append(Stop(visit, fetched, awaited, prefetched, released))
        for at in flying:  # gathered ahead for calls that did not come
            there[at] = False
        return tuple(stops)
