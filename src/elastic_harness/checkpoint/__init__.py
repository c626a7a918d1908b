"""Durable training state: folders of plain safetensors with a manifest that is written last."""
