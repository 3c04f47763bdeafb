"""Seconds of the loss over a whole split with GPT-2's vocabulary: python whole_split.py"""

import time

import numpy as np
import torch

from nrgpt import LanguageModel, ModelConfig
from nrgpt.data.shards import TokenStream
from nrgpt.measure.loss import split_loss

torch.manual_seed(0)
model = LanguageModel(ModelConfig(vocab_size=50_304, context=64, width=32, heads=4, steps=3))
text = np.random.default_rng(0).integers(50_257, size=50_000).astype(np.uint16)
began = time.perf_counter()
loss = split_loss(model, TokenStream("val", [text])).loss
print(f"{len(text):,} tokens, loss {loss:.9f}, {time.perf_counter() - began:.1f} s")
