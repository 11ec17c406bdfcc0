"""What an instance does with the jobs it is given: the prefill and decode sides, their queue, dispatch, roles."""
