"""What compute and memory workers share: process, loop, links to peers, and the end of an epoch."""
