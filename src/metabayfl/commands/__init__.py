"""What the commands do; each file is imported only when its command is called."""
