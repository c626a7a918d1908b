"""A small GPT in plain PyTorch: pre-norm blocks, rotary positions, tied weights.

Shapes: B batch, T tokens, C = d_model, H heads, D = C / H, R = D / 2, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_harness.gpt.config import ModelConfig

ROTARY_BASE = 10_000.0


class Attention(nn.Module):
    """Causal self-attention; positions enter as rotations of queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x_BTC: Tensor, cos_TR: Tensor, sin_TR: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        B, T, C = x_BTC.shape
        heads = self.qkv(x_BTC).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        q_BHTD, k_BHTD, v_BHTD = heads.unbind(0)
        q_BHTD, k_BHTD = _rotate(q_BHTD, cos_TR, sin_TR), _rotate(k_BHTD, cos_TR, sin_TR)
        dropout = self.dropout if self.training else 0.0
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, attn_mask=mask_B1TT, dropout_p=dropout, is_causal=mask_B1TT is None
        )
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to the stream after a norm of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.d_model)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.d_model)
        self.mlp_in = nn.Linear(config.d_model, config.mlp_ratio * config.d_model)
        self.mlp_out = nn.Linear(config.mlp_ratio * config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor, cos_TR: Tensor, sin_TR: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        x_BTC = x_BTC + self.dropout(self.attention(self.norm_attention(x_BTC), cos_TR, sin_TR, mask_B1TT))
        return x_BTC + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x_BTC)))))


class GPT(nn.Module):
    """Next-token logits for byte-level text. The initial weights are a function of ``seed`` alone."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_weights:
            self.head.weight = self.embedding.weight
        self._initialize(seed)

    def forward(self, idx_BT: Tensor, document_ids_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V): at each place for the token after it. With document ids, which rise from document to
        document, a token attends to those of its own document alone."""
        x_BTC = self.dropout(self.embedding(idx_BT))
        cos_TR, sin_TR = _rotary_angles(idx_BT.shape[1], self.config.d_model // self.config.n_head, x_BTC)
        mask_B1TT = None
        if document_ids_BT is not None:
            same_BTT = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
            mask_B1TT = same_BTT.tril()[:, None]
        for block in self.blocks:
            x_BTC = block(x_BTC, cos_TR, sin_TR, mask_B1TT)
        return self.head(self.norm(x_BTC))

    @torch.no_grad()
    def generate(
        self, idx: Tensor, n: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """``idx`` (B, T) continued by ``n`` sampled tokens: (B, T + n). Temperature 0 takes the likeliest.

        At most the last ``context_length`` tokens are looked at. Runs in evaluation mode.
        """
        was_training = self.training
        self.eval()
        try:
            for _ in range(n):
                window = idx if self.config.context_length is None else idx[:, -self.config.context_length :]
                logits_BV = self(window)[:, -1].float()
                if temperature <= 0:
                    token_B1 = logits_BV.argmax(dim=-1, keepdim=True)
                else:
                    token_B1 = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)
                idx = torch.cat((idx, token_B1), dim=1)
        finally:
            self.train(was_training)
        return idx

    def num_parameters(self) -> int:
        """The number of trained values; tied ones count once."""
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def _initialize(self, seed: int) -> None:
        """Normal(0, 0.02), scaled down for the layers that write into the stream (Radford et al. 2019)."""
        generator = torch.Generator().manual_seed(seed)
        scale = 1 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():  # a fixed order; tied ones once
            if parameter.dim() < 2:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                into_stream = name.endswith(("attention.out.weight", "mlp_out.weight"))
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values.mul_(0.02 * scale if into_stream else 0.02))


def _rotary_angles(length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, D/2) of Su et al. 2021, in the stream's type and place."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), frequencies)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x_BHTD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cos_TR - second * sin_TR, first * sin_TR + second * cos_TR), dim=-1).type_as(x_BHTD)
