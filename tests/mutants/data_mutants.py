"""Hand-made bugs of `data`, file by file."""

from mutant import Mutant

DATA = (
    # data/corpus.py
    Mutant(
        "copies on both sides of the split",
        "data/corpus.py",
        "held_out = self.keys < np.uint64(int(fraction * 2**64))",
        "held_out = np.arange(len(self)) < fraction * len(self)",
        "tests/data/test_data.py -k 'split_is_by_content'",
    ),
    Mutant(
        "hostile: no room for tokens is a traceback",
        "data/corpus.py",
        "        with checks.room_for_tokens():\n            self.file.flush()\n",
        "        self.file.flush()\n",
        "tests/test_hostile_files.py -k 'no_room'",
    ),
    # data/images.py
    Mutant(
        "hostile: a packed file is read to its end",
        "data/images.py",
        "_read_at_most(file, math.prod(sizes) + 1)",
        "file.read()",
        "tests/test_hostile_files.py -k 'goes_on'",
    ),
    Mutant(
        "missing files of images are found out late",
        "data/images.py",
        "    checks.readable_file(path)\n    with checks.decodable",
        "    with checks.decodable",
        "tests/data/test_data.py -k 'missing'",
    ),
    # data/samples.py
    Mutant(
        "masks from a global generator",
        "data/samples.py",
        "np.random.default_rng([self.seed, 1, index])",
        "np.random.default_rng(np.random.randint(1 << 30))",
        "tests/data/test_data.py -k 'functions_of_seed'",
    ),
    Mutant(
        "every epoch in the same order",
        "data/samples.py",
        "np.random.default_rng([self.seed, 0, epoch])",
        "np.random.default_rng([self.seed, 0, 0])",
        "tests/data/test_data.py -k 'cover_every_epoch'",
    ),
    Mutant(
        "windows lose the separators",
        "data/samples.py",
        "filled += len(piece) + 1",
        "filled += len(piece)",
        "tests/data/test_data.py -k 'cover_every_epoch'",
    ),
    Mutant(
        "separators are masked",
        "data/samples.py",
        "(tokens == vocabulary.pad) | (tokens == vocabulary.sep) | (tokens == vocabulary.mask)",
        "tokens == vocabulary.pad",
        "tests/data/test_data.py -k 'berts'",
    ),
)
