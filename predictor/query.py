"""One prediction to make."""

from dataclasses import dataclass

from predictor.served import estimate_tokens


@dataclass(frozen=True, slots=True)
class Query:
    """Either `text` or token ids of the served model's prompt, or of its ends."""

    timeout_s: float
    text: str | None = None
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    max_tokens: int | None = None

    @property
    def length(self) -> int:
        """Tokens of the whole prompt, estimated where nobody counted them."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        return len(self.token_ids) if self.text is None else estimate_tokens(self.text)
