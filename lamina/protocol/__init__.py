"""What processes say to each other: control messages, the layout of data messages, links."""
