"""The places where a live model gets positions from: experiments that find them, and proof that none is missing."""
