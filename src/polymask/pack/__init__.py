"""A domain's file: its format, saving and loading, and packs on the Hugging Face Hub."""
