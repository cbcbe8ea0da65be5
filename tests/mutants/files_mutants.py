"""Hand-made bugs of files that must survive, and of what is said about them."""

from mutant import Mutant


def tests(name: str, words: str) -> str:
    return f"tests/test_{name}.py -k '{words}'"


FILES = (
    Mutant(
        "files: written in place",
        "files.py",
        "    try:\n        yield staging\n        _sync(staging)",
        "    try:\n        yield place\n        _sync(place)",
        tests("files", "appears_when or failed_write"),
    ),
    Mutant(
        "files: not brought to disk",
        "files.py",
        "        yield staging\n        _sync(staging)\n",
        "        yield staging\n",
        tests("files", "failed_write"),
    ),
    Mutant(
        "files: a failure leaves its staging",
        "files.py",
        "        staging.unlink(missing_ok=True)\n        raise",
        "        raise",
        tests("files", "failed_write"),
    ),
    Mutant(
        "files: a link is replaced instead of what it points to",
        "files.py",
        "Path(os.path.realpath(path))",
        "Path(path)",
        tests("files", "links_modes"),
    ),
    Mutant(
        "files: a private file becomes public",
        "files.py",
        "            shutil.copymode(place, staging)",
        "            pass",
        tests("files", "links_modes"),
    ),
    Mutant(
        "files: a protected file is replaced",
        "files.py",
        "    _refuse_read_only(place)\n    sweep",
        "    sweep",
        tests("files", "links_modes"),
    ),
    Mutant(
        "files: the living are swept",
        "files.py",
        "fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        tests("files", "the_dead_are_swept"),
    ),
    Mutant(
        "files: files of others are swept",
        "files.py",
        "_OURS.fullmatch(path.name)",
        "path.name.startswith(STAGING)",
        tests("files", "only_our_names"),
    ),
    Mutant(
        "files: a folder that was being replaced is lost",
        "files.py",
        "                old.rename(place)\n        shutil",
        "                pass\n        shutil",
        tests("files", "comes_back"),
    ),
    Mutant(
        "files: a failed rename loses the old folder",
        "files.py",
        "            old.rename(path)\n        raise",
        "            pass\n        raise",
        tests("files", "failed_rename"),
    ),
    Mutant(
        "files: what is swept before it is locked is written to",
        "files.py",
        "            if staging.exists():\n",
        "            if True:\n",
        tests("files", "comes_between"),
    ),
    # records
    Mutant(
        "records: bytes that are no text stop a run",
        "training/metrics.py",
        "except (ValueError, RecursionError):\n        return None",
        "except (json.JSONDecodeError, RecursionError):\n        return None",
        tests("training", "damaged_lines"),
    ),
    Mutant(
        "records: a line with text for a number counts",
        "training/metrics.py",
        "return record if all(_is_number(value) for value in record.values()) else None",
        "return record",
        tests("training", "damaged_lines"),
    ),
    Mutant(
        "records: damaged lines are not told",
        "training/metrics.py",
        "if damaged and damaged != self._told:",
        "if False:",
        tests("training", "damaged_lines"),
    ),
    Mutant(
        "records: the result is read from what is only a record",
        "training/run.py",
        "for logs in trainer.state.log_history if",
        "for logs in metrics.records() if",
        tests("training", "not_read_from_a_record"),
    ),
    Mutant(
        "records: a changed run.json is believed",
        "checks/runs.py",
        '    if found != wanted:\n        raise CheckpointError(\n            f"{path}: is not what was written, its',
        '    if False:\n        raise CheckpointError(\n            f"{path}: is not what was written, its',
        tests("training", "a_damaged_record_is_seen"),
    ),
    Mutant(
        "checkpoints: an empty manifest verifies",
        "training/files.py",
        "if not expected or not all(",
        "if not all(",
        tests("training", "malformed_manifest"),
    ),
    Mutant(
        "checkpoints: files that nobody wrote are loaded",
        "training/files.py",
        "if name not in expected and not _is_note(name)]",
        "if False]",
        tests("training", "notes_do_not_count"),
    ),
    Mutant(
        "checkpoints: a damaged one is passed over without a word",
        "training/checkpoints.py",
        "        if damages:\n            warnings",
        "        if False:\n            warnings",
        tests("training", "damaged_checkpoints_are_seen"),
    ),
    Mutant(
        "checkpoints: a run without any whole one begins again",
        "training/checkpoints.py",
        "    if damages:\n        raise",
        "    if False:\n        raise",
        tests("training", "without_a_whole_checkpoint"),
    ),
    Mutant(
        "checkpoints: a finished run with a damaged model stays so",
        "training/run.py",
        "            verify(model)\n",
        "",
        tests("training", "lost_is_made_again"),
    ),
)
