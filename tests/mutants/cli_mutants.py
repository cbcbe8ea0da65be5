"""Hand-made bugs of `cli`, file by file."""

from mutant import Mutant

CLI = (
    # cli/calibrate.py
    Mutant(
        "command: calibrate overwrites",
        "cli/calibrate.py",
        "    checks.new_folder(out)\n",
        "",
        "tests/models/test_calibrated.py -k 'stays'",
    ),
    # cli/common.py
    Mutant(
        "a checkpoint that was asked for is told as a run that is not complete",
        "cli/common.py",
        "folder == checkpoints.folder_of(path) / folder.name",
        "folder.parent.name == checkpoints.FOLDER",
        "tests/cli/test_cli.py -k 'checkpoints_can'",
    ),
    Mutant(
        "command: padding counts as tokens",
        "cli/common.py",
        "pad_sequence([torch.ones_like(ids) for ids in some], batch_first=True)",
        "torch.ones_like(pad_sequence(some, batch_first=True))",
        "tests/cli/test_diagnose.py -k 'is_the_function'",
    ),
    Mutant(
        "hostile: damage of a model goes unseen",
        "cli/common.py",
        "        verify(folder)\n",
        "        pass\n",
        "tests/training/test_damages.py -k 'test_damages'",
    ),
    Mutant(
        "hostile: a model may bring code",
        "cli/common.py",
        "config = AutoConfig.from_pretrained(folder, trust_remote_code=False)",
        "config = AutoConfig.from_pretrained(folder)",
        "tests/test_hostile_files.py -k 'models_with_code'",
    ),
    Mutant(
        "hostile: names of outputs steer the terminal",
        "cli/common.py",
        "print(printable(text), file=sys.stderr)",
        "print(text, file=sys.stderr)",
        "tests/test_hostile_files.py -k 'names_of_files'",
    ),
    Mutant(
        "files without sequences count as many as there are files",
        "cli/common.py",
        "    named = read_sequences(loaded, paths)\n    checks.something_to_read(len(named), paths)\n",
        "    named = read_sequences(loaded, paths)\n    checks.something_to_read(len(paths), paths)\n",
        "tests/cli/test_common.py -k 'without_sequences'",
    ),
    Mutant(
        "a head of its own is refused where nobody needs it",
        "cli/common.py",
        'allowed="lm_head." if not head else None',
        'allowed="lm_head." if head else None',
        "tests/cli/test_cli.py -k 'head_of_its_own'",
    ),
    # cli/demo.py
    Mutant(
        "the demonstration prefers favor to a window that does better",
        "cli/demo.py",
        'if gains["window"] >= best:',
        'if gains["window"] > 2 * best:',
        "tests/cli/test_demo.py -k 'verdict'",
    ),
    Mutant(
        "a demonstration goes on after a training that failed",
        "cli/demo.py",
        "            return code\n",
        "            pass\n",
        "tests/cli/test_demo.py -k 'fails_ends_it'",
    ),
    # cli/generate.py
    Mutant(
        "pixels are darker than they were sampled",
        "cli/generate.py",
        "np.stack([sample.numpy() for sample in samples]) - len(SPECIALS)",
        "np.stack([sample.numpy() for sample in samples]) + len(SPECIALS)",
        "tests/cli/test_cli.py -k 'pixels'",
    ),
    # cli/train.py
    Mutant(
        "options of the command have no defaults",
        "cli/train.py",
        "default = None if field.default is MISSING else field.default",
        "default = None",
        "tests/test_defaults.py -k 'frozen'",
    ),
    Mutant(
        "run.json is read again",
        "cli/train.py",
        'resume=stored or given["resume"],',
        'resume=given["resume"],',
        "tests/cli/test_cli.py -k 'read_once'",
    ),
    Mutant(
        "the command waits for the Trainer",
        "cli/train.py",
        "from subquad.training.options import DATA,",
        "from subquad.training.run import train as _\nfrom subquad.training.options import DATA,",
        "tests/test_package.py -k 'at_once'",
    ),
    Mutant(
        "hostile: a tokenizer may bring code",
        "cli/train.py",
        "AutoTokenizer.from_pretrained(name, trust_remote_code=False)",
        "AutoTokenizer.from_pretrained(name)",
        "tests/test_hostile_files.py -k 'tokenizers_with_code'",
    ),
    Mutant(
        "hostile: names of runs are read as markup",
        "cli/train.py",
        "soft_wrap=True, markup=False)",
        "soft_wrap=True)",
        "tests/test_hostile_files.py -k 'names_of_files'",
    ),
    Mutant(
        "a stopped run ends like one that a signal number names",
        "cli/train.py",
        "return 128 + result.stopped_by",
        "return result.stopped_by",
        "tests/cli/test_exit_codes.py -k 'stopped'",
    ),
)
