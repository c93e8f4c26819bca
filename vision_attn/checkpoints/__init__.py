"""Safe loading and saving of models."""

from vision_attn.checkpoints.load import fill, load_model
from vision_attn.checkpoints.read import read_state_dict
from vision_attn.checkpoints.save import save_model

__all__ = ["fill", "load_model", "read_state_dict", "save_model"]
