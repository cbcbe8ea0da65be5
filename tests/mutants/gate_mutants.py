"""Hand-made bugs of what stands between Python and the engines: the gate, the operators' arguments, states."""

from mutant import Mutant


def gate(words: str) -> str:
    return f"tests/test_gate.py -k '{words}'"


GATE, STEP, RUN = "kernels/cpu/gate.py", "kernels/favor/native.py", "kernels/cpu/call.py"
ARGUMENTS, STATES, WORDS = "kernels/arguments.py", "checks/states.py", "checks/engine.py"

GATES = (
    # pointers
    Mutant(
        "gate: any dtype",
        GATE,
        "if tensor.dtype is not self.dtype:",
        "if False:",
        gate("every_pointer_is_checked or step_looks"),
    ),
    Mutant(
        "gate: any shape",
        GATE,
        "if tensor.shape != self.shape:",
        "if tensor.dim() != len(self.shape):",
        gate("every_pointer_is_checked"),
    ),
    Mutant(
        "gate: any device",
        GATE,
        "not (address and tensor.is_cpu and (dense or rows))",
        "not (dense or rows)",
        gate("every_pointer_is_checked or cannot_be_read"),
    ),
    Mutant(
        "gate: gaps between numbers",
        GATE,
        "and (dense or rows))",
        ")",
        gate("every_pointer_is_checked or cannot_be_read"),
    ),
    Mutant(
        "gate: gaps between numbers of a row",
        GATE,
        "if width > 1 and last != 1:",
        "if False:",
        gate("rows_may_have_strides"),
    ),
    Mutant("gate: odd addresses", GATE, " or address % self.number or", " or", gate("cannot_be_read")),
    Mutant("gate: lazily negated numbers", GATE, " or tensor.is_neg():", ":", gate("lazy_negative")),
    Mutant("gate: a storage that was cut", GATE, "if end > there:", "if False:", gate("cannot_be_read")),
    Mutant(
        "gate: the last row of a view is forgotten",
        GATE,
        "token * (tokens - 1) + width",
        "token * (tokens - 1)",
        gate("rows_may_have_strides"),
    ),
    Mutant(
        "gate: strides of single tokens",
        GATE,
        "batch if batches > 1 else 0",
        "batch",
        gate("not_stepped_over"),
    ),
    Mutant(
        "gate: fake tensors",
        GATE,
        "if type(tensor) is not Tensor and _has_no_numbers(tensor):",
        "if not isinstance(tensor, Tensor):",
        gate("cannot_be_read and fake"),
    ),
    Mutant(
        "gate: pointers that are missing",
        GATE,
        "if name not in given:",
        "if False:",
        gate("every_pointer_is_checked or numbers_ask_for"),
    ),
    Mutant(
        "gate: half of a pair",
        GATE,
        "if (one in given) != (other in given):",
        "if False:",
        gate("comes_together"),
    ),
    Mutant(
        "gate: features beyond the dims",
        GATE,
        'if tensors.get("query") is None and',
        "if False and",
        gate("as_many_features"),
    ),
    Mutant(
        "gate: sinks that nobody sees",
        GATE,
        'names |= SINKS & FIELDS[structure].keys() if n["sinks"] else set()',
        "pass",
        gate("numbers_ask_for"),
    ),
    # numbers
    Mutant(
        "gate: numbers without bounds",
        GATE,
        "        checks.number(OP, name, numbers[name], low, high)\n",
        "        pass\n",
        gate("number_has_bounds"),
    ),
    Mutant(
        "gate: maps of other heads",
        GATE,
        '    checks.choice(OP, "map_heads", n["map_heads"], (1, n["key_heads"]))\n',
        "",
        gate("fit_each_other"),
    ),
    Mutant(
        "gate: blocks longer than a tile",
        GATE,
        'checks.number(OP, "block", n["block"], 1, TILE)',
        "pass",
        gate("fit_each_other"),
    ),
    Mutant(
        "gate: a state that int32 cannot count",
        GATE,
        "if numbers_of_state > COUNT:",
        "if False:",
        gate("size_overflows"),
    ),
    Mutant(
        "gate: sizes that int64 cannot count", GATE, "if count > MOST_NUMBERS:", "if False:", gate("size_overflows")
    ),
    Mutant(
        "gate: near blocks without as many keys",
        GATE,
        'checks.choice(OP, "key_length", n["key_length"], (n["length"],))',
        "pass",
        gate("fit_each_other"),
    ),
    Mutant(
        "gate: negative lengths",
        STEP,
        '    checks.lengths(gate.OP, "length", lengths, MOST_TOKENS)\n',
        "",
        gate("step_looks"),
    ),
    Mutant(
        "gate: what the engine writes has torch's default dtype",
        RUN,
        'return torch.empty(shape, dtype=torch.float32, device="cpu")',
        "return torch.empty(shape)",
        gate("default_dtype"),
    ),
    # operators
    Mutant(
        "operators: tensors that are missing",
        ARGUMENTS,
        'if not kind.endswith("?"):',
        "if False:",
        gate("called_directly"),
    ),
    Mutant(
        "operators: sizes are not compared",
        WORDS,
        "not all(map(_fits, tensor.shape, shape))",
        "False",
        gate("called_directly"),
    ),
    Mutant("operators: any dtype", WORDS, "if tensor.dtype not in dtypes:", "if False:", gate("called_directly")),
    Mutant(
        "operators: a state without an order",
        ARGUMENTS,
        "if far_sum is not None and not causal:",
        "if False:",
        gate("called_directly"),
    ),
    Mutant(
        "operators: no empty dimension is refused",
        ARGUMENTS,
        "if letter not in MAY_BE_EMPTY and self.known.get(letter) == 0:",
        "if False:",
        gate("called_directly"),
    ),
    Mutant(
        "operators: blocks that do not exist",
        WORDS,
        "if low < 0 or high > most:",
        "if False:",
        gate("blocks_that_do_not"),
    ),
    Mutant(
        "operators: saved states of another number",
        ARGUMENTS,
        '    sizes.known["borders"] = borders\n',
        "",
        gate("backwards_called"),
    ),
    # states
    Mutant(
        "states: of another precision, as they are",
        STATES,
        "return tensor.to(wanted)",
        "return tensor",
        gate("another_precision"),
    ),
    Mutant(
        "states: whole numbers of any dtype are converted",
        STATES,
        "if not wanted.is_floating_point or tensor.dtype not in checks.FLOAT_DTYPES:",
        "if False:",
        gate("field_is_wrong"),
    ),
    Mutant(
        "states: counts without bounds",
        STATES,
        "_check_values(op, name, fitting, field)",
        "pass",
        gate("lengths_out or buckets_have"),
    ),
    Mutant(
        "states: free sizes that differ",
        STATES,
        "sizes.setdefault(want, got) if isinstance(want, str)",
        "got if isinstance(want, str)",
        gate("contradict"),
    ),
    Mutant(
        "states: tails of several lengths",
        STATES,
        "if min(values) != max(values):",
        "if False:",
        gate("contradict"),
    ),
    Mutant("states: more tokens than are kept", STATES, "if value > most:", "if False:", gate("contradict")),
    Mutant(
        "states: features of another function",
        "checks/features.py",
        "if far_sum.shape[2] != features:",
        "if False:",
        gate("another_function"),
    ),
    # memory
    Mutant(
        "a dilation beyond the sequence takes memory",
        "kernels/sparse/bands.py",
        "    band = band.within(k.shape[2])\n",
        "",
        gate("beyond_the_sequence and dilation"),
    ),
    Mutant(
        "chunks beyond the sequence take memory",
        "kernels/favor/problem.py",
        "chunk=min(options.chunk, 1 << (length - 1).bit_length())",
        "chunk=options.chunk",
        gate("beyond_the_sequence and chunk"),
    ),
    Mutant(
        "chunks of linear beyond the sequence take memory",
        "kernels/linear/torch.py",
        "min(options.chunk, max(self.p.length, self.p.key_length))",
        "options.chunk",
        gate("beyond_the_sequence and chunk"),
    ),
    Mutant(
        "strides beyond the sequence take memory",
        "mechanisms/strided.py",
        "    options = options.within(length)\n",
        "",
        gate("beyond_the_sequence and stride"),
    ),
    Mutant(
        "tiles beyond the sequence take memory",
        "kernels/sparse/buckets.py",
        "options._replace(tile=min(options.tile, q.shape[2]))",
        "options",
        gate("tiles_beyond"),
    ),
    Mutant(
        "labels of windows overflow",
        "mechanisms/window.py",
        "q_place.clamp(max=self.options.global_tokens)",
        "q_place",
        gate("labels_of_windows"),
    ),
    Mutant(
        "gate: a tensor that was right once is right for every pointer",
        GATE,
        "if tensor is not before or pointer.declared != declared:",
        "if tensor is not before:",
        gate("one_tensor_for_two"),
    ),
)
