"""Studies in the lab need what the lab's own tests need."""

from lab.conftest import needs_lab

__all__ = ["needs_lab"]
