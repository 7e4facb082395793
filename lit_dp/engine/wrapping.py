"""A stand-in for a user's dataset: whatever it does not do itself is done by the one inside."""

from typing import Any


class Wrapping:
    """Attributes are read from and set on `inner`; a subclass puts its own into `__dict__`."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "__getstate__", "__setstate__"):  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)
