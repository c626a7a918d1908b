"""Shows runs while they go on: a page for the browser, and `top` for the terminal. It only reads run folders."""
