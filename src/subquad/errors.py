"""Every error subquad raises on purpose. Each is also the builtin error a caller would expect."""


def printable(text: str) -> str:
    """Control characters and the like as escapes: a name from a file must not steer a terminal.

    Example:
        >>> print(printable("a" + chr(27) + "[2J"))
        a\\x1b[2J
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class SubquadError(Exception):
    """Base of all errors raised by subquad."""

    def __init__(self, message: str = "") -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))


class ShapeError(SubquadError, ValueError):
    """Tensors whose sizes do not fit together, or do not fit the mechanism."""


class DtypeError(SubquadError, TypeError):
    """A tensor of the wrong element type, or something that is no tensor at all."""


class MaskError(SubquadError, ValueError):
    """A mask of the wrong type or shape."""


class ConfigError(SubquadError, ValueError):
    """An option that does not exist, or a value it cannot take."""


class MissingPackageError(SubquadError, ImportError):
    """A package that a part of subquad needs, and that is installed with an extra."""


class BackendError(SubquadError, RuntimeError):
    """Something the engine, the device or the transform at hand cannot do."""


class DataError(SubquadError, ValueError):
    """A file that is missing, damaged, or holds something else than what was asked for."""


class CheckpointError(SubquadError, RuntimeError):
    """A run or a checkpoint that cannot be written, read or continued."""


class TrainingError(SubquadError, RuntimeError):
    """Training that cannot go on, such as a loss that is no number."""


class CalibrationError(SubquadError, RuntimeError):
    """Features that cannot be made as good as asked."""


class UncalibratedWarning(UserWarning):
    """Features that were meant to be fitted to data are used as they come."""


class RenamedWarning(FutureWarning):
    """A name of an earlier version, which still works."""


class DamageWarning(UserWarning):
    """A damaged record or checkpoint that something else could take the place of."""


class FeatureWarning(UserWarning):
    """Features that do no better in a model than no features at all."""
