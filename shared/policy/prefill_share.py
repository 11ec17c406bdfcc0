"""How often decodes have a prompt beside them: a decaying share of an engine's steps."""

FADE = 1.0 - 1.0 / 64.0  # a step counts so much less with each step after it


class PrefillShare:
    """Of the last steps with decodes in them, how many computed prompts, too."""

    __slots__ = ("_mixed", "_steps")

    def __init__(self) -> None:
        self._steps = self._mixed = 0.0

    def mixed(self) -> None:
        """A step of decodes and prompts has ended."""
        self._steps = self._steps * FADE + 1.0
        self._mixed = self._mixed * FADE + 1.0

    def plain(self, steps: int = 1) -> None:
        """So many steps of decodes alone have ended."""
        fade: float = FADE**steps
        self._steps = self._steps * fade + (1.0 - fade) / (1.0 - FADE)
        self._mixed *= fade

    def after(self, plain_steps: int = 0) -> float:
        """The share, 0..1, once so many more plain steps have ended; 0 before the first step."""
        fade: float = FADE**plain_steps
        steps = self._steps * fade + (1.0 - fade) / (1.0 - FADE)
        return self._mixed * fade / steps if steps > 0.0 else 0.0
