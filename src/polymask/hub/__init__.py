"""Packs on the Hugging Face Hub: hf:USER/REPO in place of a path, and pushes with a model card."""

from polymask.hub.names import HubName, local_pack

__all__ = ["HubName", "local_pack"]
