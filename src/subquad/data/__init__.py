"""Proteins, text and images as token sequences; samples that are pure functions of a seed and an index."""

from subquad.data.corpus import Corpus, CorpusWriter
from subquad.data.hub import hub_texts, is_hub_name
from subquad.data.images import images_corpus, load_images
from subquad.data.proteins import encode, load_proteins, read_fasta
from subquad.data.samples import OBJECTIVES, Collator, Crops, Images, Samples, Unigram, Windows, unigram_baseline
from subquad.data.text import load_text, texts_corpus
from subquad.data.vocabulary import Vocabulary, byte_tokenizer, of_tokenizer, protein_tokenizer

__all__ = [
    "OBJECTIVES",
    "Collator",
    "Corpus",
    "CorpusWriter",
    "Crops",
    "Images",
    "Samples",
    "Unigram",
    "Vocabulary",
    "Windows",
    "byte_tokenizer",
    "encode",
    "hub_texts",
    "images_corpus",
    "is_hub_name",
    "load_images",
    "load_proteins",
    "load_text",
    "of_tokenizer",
    "protein_tokenizer",
    "read_fasta",
    "texts_corpus",
    "unigram_baseline",
]
