"""Hand-made bugs of strided attention and of the lines it is cut into."""

from mutant import Mutant


def strided(words: str) -> str:
    return f"tests/test_strided.py -k '{words}'"


STATE, PARTS, LINES = "mechanisms/strided_state.py", "mechanisms/strided_parts.py", "kernels/sparse/lines.py"

STRIDED = (
    Mutant(
        "strided: the token itself counted twice",
        PARTS,
        "causal_band(lines, 1, rows, options.scale)",
        "causal_band(lines, 0, rows, options.scale)",
        strided("papers_set"),
    ),
    Mutant(
        "strided: the token itself counted twice, bidirectional",
        PARTS,
        "symmetric_band(lines, rows, counts, options.scale, skip_self=True)",
        "symmetric_band(lines, rows, counts, options.scale)",
        strided("strided-forward_equals_reference"),
    ),
    Mutant(
        "strided: a window one token too long",
        PARTS,
        "_whole(tokens.q, tokens.k, tokens.v), options.stride - 1",
        "_whole(tokens.q, tokens.k, tokens.v), options.stride",
        strided("papers_set"),
    ),
    Mutant(
        "strided: own summaries counted twice",
        PARTS,
        "rule = Rule(1) if causal else Rule(-keys, keys, skip_self=True)",
        "rule = Rule(0) if causal else Rule(-keys, keys)",
        strided("papers_set"),
    ),
    Mutant(
        "strided: padding at the end is seen",
        PARTS,
        "of_keys = torch.where(position < counts[:, None], block, ABSENT_KEY)",
        "of_keys = block.expand(counts.shape[0], -1)",
        strided("fixed-all-summaries-forward_equals or fixed-all-summaries-masked_forward"),
    ),
    Mutant(
        "strided: residues counted without rounding up",
        PARTS,
        "(counts[:, None] - residue + options.stride - 1) // options.stride",
        "(counts[:, None] - residue) // options.stride",
        strided("strided-forward_equals_reference"),
    ),
    Mutant(
        "strided: a window's last block is not met",
        LINES,
        "torch.arange(min(tiles - 1, -(-high // tile)) + 1,",
        "torch.arange(min(tiles - 1, high // tile) + 1,",
        strided("many_tiles"),
    ),
    Mutant(
        "strided: a symmetric window misses its first block",
        LINES,
        "- back).clamp(0, tiles - width)",
        "- back + 1).clamp(0, tiles - width)",
        strided("many_tiles"),
    ),
    Mutant(
        "strided: the line of a piece begins one stride late",
        STATE,
        "first = (state.length // stride - 1).clamp(min=0)",
        "first = state.length // stride",
        strided("long_pieces"),
    ),
    Mutant(
        "strided: a finished block leaves no summary",
        STATE,
        "slots = slots_of(slots, place < blocks * summary, past + self.size // stride * summary)",
        "slots = slots_of(slots, place < self.first * summary, past + self.size // stride * summary)",
        strided("fixed-extend_equals"),
    ),
    Mutant(
        "strided: sequences at different positions share a past",
        STATE,
        "self.past = torch.where(block < self.first, block, ABSENT_KEY)",
        "self.past = block.expand(self.first.shape[0], -1)",
        strided("long_pieces and fixed or fixed-masked_extend"),
    ),
)
