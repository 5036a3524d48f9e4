"""Host side of generation: what is asked, how many tokens a round keeps, what the caller sees."""
