"""What compute and memory workers have in common: process, links, the end of an epoch."""
