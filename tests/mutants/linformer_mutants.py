"""Hand-made bugs of `linformer`, in the mechanism and in how models share its projections."""

from mutant import Mutant


def mechanism(words: str) -> str:
    return f"tests/test_linformer.py -k '{words}'"


def models(words: str) -> str:
    return f"tests/test_linformer_models.py -k '{words}'"


LINFORMER, MODELING = "mechanisms/linformer.py", "models/modeling.py"

LINFORMERS = (
    Mutant(
        "linformer: the last columns of E instead of the first",
        LINFORMER,
        "matrix[..., : x.shape[2]]",
        "matrix[..., -x.shape[2] :]",
        mechanism("forward_equals_reference and learned"),
    ),
    Mutant(
        "linformer: E takes the place of F",
        LINFORMER,
        "return self.e, self.e if self.f is None else self.f",
        "return self.e, self.e",
        mechanism("function_is_the_module"),
    ),
    Mutant(
        "linformer: phi(0) = 1 of masked keys is projected",
        LINFORMER,
        "_real_only(phi(k.to(dtype)), key_mask)",
        "phi(k.to(dtype))",
        mechanism("padding_changes_nothing and linear"),
    ),
    Mutant(
        "linformer: slots without tokens take weight",
        LINFORMER,
        "slots = self._tokens_per_slot(k, key_mask) > 0 if blockwise_padding else None",
        "slots = None",
        mechanism("padding_changes_nothing and (mean or convolution)"),
    ),
    Mutant(
        "linformer: the last, partial block divided by the size of a whole one",
        LINFORMER,
        "blocks.sum(3) / self._tokens_per_slot(x, key_mask).clamp(min=1)[:, None, :, None]",
        "blocks.mean(3)",
        mechanism("forward_equals_reference and mean"),
    ),
    Mutant(
        "linformer: Gaussian entries of variance 1",
        LINFORMER,
        "drawn * self.rank**-0.5",
        "drawn",
        mechanism("johnson_lindenstrauss"),
    ),
    Mutant(
        "linformer: learned entries of variance 1 / rank",
        LINFORMER,
        "(3 / weight.shape[-1]) ** 0.5",
        "(3 / self.rank) ** 0.5",
        mechanism("as_large_as_keys"),
    ),
    Mutant(
        "linformer: normalised by projected row sums, which have both signs",
        LINFORMER,
        "total = (projected_k if self.convex else phi_k).sum(2, keepdim=True)",
        "total = projected_k.sum(2, keepdim=True)",
        mechanism("forward_equals_reference and linear"),
    ),
    Mutant(
        "linformer: padding on the left is let through",
        "checks/tensors.py",
        "late = mask[:, 1:] & ~mask[:, :-1]",
        "late = mask[:, 1:] & ~mask[:, 1:]",
        mechanism("word_for_word and (left or holes)"),
    ),
    Mutant(
        "linformer: layers do not share",
        LINFORMER,
        'return ("e",) if self.sharing == "layerwise" else ()',
        "return ()",
        models("number_of_projections"),
    ),
    Mutant(
        "linformer: layers share only where word embeddings are tied",
        MODELING,
        "else dict(self._tied_weights_keys)",
        "else super().get_expanded_tied_weights_keys()",
        models("number_of_projections"),
    ),
    Mutant(
        "linformer: one projection for all heads",
        LINFORMER,
        'heads = self.num_heads or 1 if self.sharing == "none" else 1',
        "heads = 1",
        models("number_of_projections"),
    ),
)
