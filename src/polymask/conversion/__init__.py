"""From and to other formats: fine-tuned checkpoints to packs, domains to other runtimes."""
