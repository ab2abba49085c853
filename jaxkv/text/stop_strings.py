"""Stop strings: finds the end of an answer while its text grows.

Stop strings are searched in the text of the answer. A stop string that contains the
text of a special token is searched in the text that shows special tokens, and the
answer is cut at the corresponding token.
"""

from collections.abc import Sequence

from jaxkv.text.streams import TextStream


class StopSearch:
    """Searches for stop strings in one answer.

    Args:
      stops: the stop strings.
      special_stops: stop strings that contain the text of a special token.
      stream: decoder of the answer that shows special tokens; None without
        `special_stops`.
    """

    def __init__(
        self,
        stops: Sequence[str],
        special_stops: Sequence[str] = (),
        stream: TextStream | None = None,
    ):
        self._stops = stops
        self._special_stops = special_stops
        self._stream = stream
        self._num_final = 0
        self._shown = ""
        # Characters with and without special tokens after 0, 1, 2, ... tokens.
        self._lengths = [(0, 0)]

    def push(self, final: str, tail: str, token: int | None) -> int | None:
        """Adds a token; returns the number of characters before a stop string.

        Args:
          final: text of the answer that later tokens cannot change.
          tail: the remaining text, which later tokens may change.
          token: the last token; None at the end of the answer.

        Returns:
          Length at which `final + tail` is cut; None without a stop string.
        """
        text = final + tail if tail else final
        places = _places(text, self._stops, self._num_final)
        self._num_final = len(final)
        if (stream := self._stream) is not None:
            num_final = len(self._shown)
            self._shown += stream.finish() if token is None else stream.push(token)
            shown = self._shown + stream.tail()
            self._lengths.append((len(shown), len(text)))
            if places_of_stops := _places(shown, self._special_stops, num_final):
                places.append(self._without_special_tokens(min(places_of_stops)))
        return min(places, default=None)

    def num_safe(self, final: str) -> int:
        """Returns the number of characters before the longest possible match.

        A possible match is an end of the text that a stop string begins with. Called
        after `push` returned None, with the same `final`.
        """
        places = [_start_of_possible_match(final, self._stops)]
        special = _start_of_possible_match(self._shown, self._special_stops)
        if special < len(self._shown):
            places.append(self._without_special_tokens(special))
        return min(places)

    def _without_special_tokens(self, place: int) -> int:
        """Maps a position in the text with special tokens to the text without them.

        A hidden token adds no characters: its positions map to the one before it.
        """
        pairs = zip(self._lengths, self._lengths[1:], strict=False)
        return next(
            max(before, after - (shown_after - place))
            for (_, before), (shown_after, after) in pairs
            if shown_after > place
        )


def _places(text: str, stops: Sequence[str], num_known: int) -> list[int]:
    """Returns the starts of stop strings that end after `num_known` characters."""
    positions = [text.find(stop, max(0, num_known - len(stop) + 1)) for stop in stops]
    return [place for place in positions if place >= 0]


def _start_of_possible_match(text: str, stops: Sequence[str]) -> int:
    """Returns the start of the longest end of `text` that begins a stop string.

    It is `len(text)` if there is none.
    """
    start = len(text)
    for stop in stops:
        place = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while 0 <= place < start and not stop.startswith(text[place:]):
            place = text.find(stop[0], place + 1)
        start = place if 0 <= place < start else start
    return start
