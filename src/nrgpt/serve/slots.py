"""A cache whose rows come and go."""

from torch import Tensor

from ..decode.cache import Cache, Room


class Slots(Cache):
    """Memory for some texts, of which the first ones are in use: so a step is computed for these
    alone, a text that leaves is replaced by the last one, and nothing else is copied."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self.rooms: dict[tuple[int | None, int], Room] = {}
        self.rows = 0
        """There is memory for so many."""

    def admit(self, others: Cache) -> None:
        """Take over all texts of another cache."""
        first, last = len(self.lengths), len(self.lengths) + len(others.lengths)
        if last > self.rows:
            self.rows = max(last, 2 * self.rows)
        stop = max(others.lengths)
        for place, kept in others.kept.items():
            self.rooms[place] = tuple(
                enlarged(room, like, self.rows)
                for room, like in zip(self.rooms.get(place, kept), kept, strict=True)
            )
            for room, keys in zip(self.rooms[place], kept, strict=True):
                room[first:last, :, :stop] = keys[:, :, :stop]
        self.lengths = [*self.lengths, *others.lengths]
        self.show_used()

    def leave(self, row: int) -> None:
        """Forget a text. The last one gets its row."""
        last = len(self.lengths) - 1
        length = self.lengths[last]
        if row < last:
            for room in (room for rooms in self.rooms.values() for room in rooms):
                room[row, :, :length] = room[last, :, :length]
            self.lengths[row] = length
        self.lengths.pop()
        self.show_used()

    def show_used(self) -> None:
        used = len(self.lengths)
        self.kept = {
            place: tuple(room[:used] for room in rooms) for place, rooms in self.rooms.items()
        }


def enlarged(room: Tensor, like: Tensor, rows: int) -> Tensor:
    """``room``, or a larger copy; ``like`` itself is never used, since others may write into it."""
    if room is not like and len(room) >= rows:
        return room
    larger = like.new_zeros(rows, *like.shape[1:])
    if room is not like:
        larger[: len(room)] = room
    return larger
