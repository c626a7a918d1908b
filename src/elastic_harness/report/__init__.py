"""How runs and their failures are shown to people: in words, as a page, in pictures."""
