"""balance=migrate: slow ranks lend units to faster ones, as far as movement leaves something of the gain."""

from .decider import Decider, Room
from .policy import BalanceAction
from .search import Search
from .speeds import Speeds


class MigratePolicy(Decider):
    """The lossless split, or a part of the way to it; no accuracy is lost."""

    @property
    def name(self) -> str:
        return "migrate"

    def _answer(self, speeds: Speeds, room: Room) -> tuple[tuple[BalanceAction, ...], dict[int, float]]:
        found = Search(self._work, speeds, room, self._movement, self._products).best([{}])
        return found.moves(), {}
