"""Models of links: delay, rate and loss; TCP's congestion window and its loss recovery. Pure."""
