"""What runs next, who owns which page, and when a request is done. Plain Python and numpy."""
