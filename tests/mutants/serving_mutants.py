"""Hand-made bugs of `serving`, file by file."""

from mutant import Mutant

SERVING = (
    # serving/reader.py
    Mutant(
        "reader: every sequence stands where the first one does",
        "serving/reader.py",
        "positions = positions + cache.length[:, None]",
        "positions = positions + cache.length[0]",
        "tests/serving/test_batcher.py -k single_precision",
    ),
    Mutant(
        "reader: a call that fails keeps what some layers have read",
        "serving/reader.py",
        "            cache.restore(before)\n",
        "",
        "tests/serving/test_batcher.py -k fails",
    ),
    Mutant(
        "reader: joined caches lose what convolutions remember",
        "serving/reader.py",
        "torch.cat([layer.recent for layer in layers])",
        "torch.cat([layers[0].recent for layer in layers])",
        "tests/serving/test_batcher.py -k 'generate_gives and short_conv'",
    ),
    Mutant(
        "reader: joined caches count the tokens of the first",
        "serving/reader.py",
        "new.length = torch.cat([cast(Tensor, cache.length) for cache in caches])",
        "new.length = torch.cat([cast(Tensor, caches[0].length) for cache in caches])",
        "tests/serving/test_reader.py -k 'joined and favor'",
    ),
    Mutant(
        "reader: a batch is as long as all sequences that were in it",
        "serving/reader.py",
        "longest = int(new.length.max())",
        "longest = max(cache.get_seq_length() for cache in caches)",
        "tests/serving/test_batcher.py -k however_long",
    ),
    Mutant(
        "reader: tables of positions have no end",
        "serving/reader.py",
        'limits.append(getattr(config, "max_position_embeddings", None))',
        "pass",
        "tests/serving/test_errors.py -k long",
    ),
    # serving/batcher.py
    Mutant(
        "batcher: a sequence that ended keeps its row",
        "serving/batcher.py",
        "if not request.finished]\n        fresh",
        "]\n        fresh",
        "tests/serving/test_batcher.py -k tokens_come",
    ),
    Mutant(
        "batcher: a prompt is read whole, however long",
        "serving/batcher.py",
        "piece, rest = reading.rest[:, :left], reading.rest[:, left:]",
        "piece, rest = reading.rest, reading.rest[:, :0]",
        "tests/serving/test_batcher.py -k tokens_come",
    ),
    Mutant(
        "batcher: more rows than there are",
        "serving/batcher.py",
        "len(self._running) + len(self._read) >= self.rows",
        "len(self._running) >= self.rows",
        "tests/serving/test_batcher.py -k never_more",
    ),
    Mutant(
        "batcher: a snapshot of the prefix is not taken",
        "serving/batcher.py",
        "            prefix = prefix.snapshot()\n",
        "",
        "tests/serving/test_batcher.py -k 'one_prefix and favor'",
    ),
    Mutant(
        "batcher: a prompt that cannot be read is tried forever",
        "serving/batcher.py",
        'reading.request.reason = "error"',
        "pass",
        "tests/serving/test_batcher.py -k cannot_be_read",
    ),
    Mutant(
        "batcher: a prefix counts for nothing in the length",
        "serving/batcher.py",
        "past = 0 if prefix is None or prefix.length is None else int(prefix.length[0])",
        "past = 0",
        "tests/serving/test_errors.py -k long",
    ),
    # serving/request.py
    Mutant(
        "request: one generator for all, torch's",
        "serving/request.py",
        "token = chosen(logits, self.sampling, self._generator)",
        "token = chosen(logits, self.sampling, None)",
        "tests/serving/test_batcher.py -k samples",
    ),
    Mutant(
        "request: it goes on behind its end",
        "serving/request.py",
        'self.reason = "eos"',
        "pass",
        "tests/serving/test_batcher.py -k own_tokens",
    ),
    # serving/sampling.py
    Mutant(
        "sampling: the token that completes the share is left out",
        "serving/sampling.py",
        "weights.cumsum(-1) - weights >= share",
        "weights.cumsum(-1) >= share",
        "tests/serving/test_batcher.py -k probabilities",
    ),
    # serving/saved.py
    Mutant(
        "saved: a cache of another model is loaded",
        "serving/saved.py",
        'checks.same_model(path, said["model"], digests.of_model(model))',
        "pass",
        "tests/serving/test_saved.py -k another",
    ),
    Mutant(
        "saved: numbers are taken as they are",
        "serving/saved.py",
        'checks.same_digest(path, said["digest"], digests.of_tensors(tensors))',
        "pass",
        "tests/serving/test_saved.py -k 'other_numbers or flipped'",
    ),
    # models/digests.py
    Mutant(
        "digests: mechanisms do not count",
        "models/digests.py",
        "said = [type(model).__name__, config, mechanisms]",
        "said = [type(model).__name__, config]",
        "tests/serving/test_saved.py -k another_model",
    ),
    Mutant(
        "digests: buffers that are not saved do not count",
        "models/digests.py",
        "(*model.state_dict().items(), *model.named_buffers())",
        "(*model.named_parameters(),)",
        "tests/serving/test_saved.py -k another_model",
    ),
    # models/cache.py and conversion/generation.py
    Mutant(
        "caches: what is taken back stays counted",
        "models/cache.py",
        "            layer.take(old)\n        self.length = kept.length\n",
        "            layer.take(old)\n",
        "tests/models/test_cache.py -k restored",
    ),
    Mutant(
        "caches: a fork is the cache itself",
        "models/cache.py",
        "        new = self.snapshot()\n        new.batch_repeat_interleave(copies)",
        "        new = self\n        new.batch_repeat_interleave(copies)",
        "tests/models/test_cache.py -k forks",
    ),
    Mutant(
        "caches: padding counts in swapped models",
        "conversion/generation.py",
        "real = None if mask is None or mask.dim() != 2 else mask[:, -new:].bool()",
        "real = None",
        "tests/models/test_cache.py -k row_by_row",
    ),
    # states of several sequences
    Mutant(
        "join: exact attention pads behind the newest tokens",
        "mechanisms/softmax.py",
        "k, v = (F.pad(x, (0, 0, before, 0)) for x in (state.k, state.v))",
        "k, v = (F.pad(x, (0, 0, 0, before)) for x in (state.k, state.v))",
        "tests/mechanisms/test_contract.py -k 'joined and softmax'",
    ),
    Mutant(
        "join: places that no sequence needs are kept",
        "mechanisms/softmax.py",
        "first = int((state.mask.any(0).cumsum(0) == 0).sum())",
        "first = 0",
        "tests/mechanisms/test_contract.py -k 'joined and softmax'",
    ),
    Mutant(
        "join: tails are taken to be equally full",
        "mechanisms/bucket_state.py",
        "if len({int(state.waiting[0]) for state in given}) > 1:",
        "if False:",
        "tests/mechanisms/test_buckets.py -k joined",
    ),
    Mutant(
        "join: pages of the longest sequence are cut off",
        "mechanisms/pages_state.py",
        "most = int(torch.cat([state.stored for state in given]).max())",
        "most = int(torch.cat([state.stored for state in given]).min())",
        "tests/mechanisms/test_contract.py -k 'joined and pages'",
    ),
    Mutant(
        "join: summaries of one block less",
        "mechanisms/strided_state.py",
        "most = most // options.stride * options.summary",
        "most = (most // options.stride - 1) * options.summary",
        "tests/mechanisms/test_strided.py -k joined",
    ),
    Mutant(
        "join: a mixed layer joins if one of its parts does",
        "mechanisms/mixed.py",
        "return all(part.supports_join for part in self.mechanisms())",
        "return any(part.supports_join for part in self.mechanisms())",
        "tests/serving/test_errors.py -k mixed",
    ),
    Mutant(
        "join: states that grow are joined without being asked how",
        "mechanism.py",
        "return self.supports_state and (own or not self.state_grows)",
        "return self.supports_state",
        "tests/serving/test_errors.py -k join",
    ),
)
