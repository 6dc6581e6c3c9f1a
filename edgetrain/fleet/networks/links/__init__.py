"""Models of links in virtual time: capacity, TCP's window and its repair of losses."""
