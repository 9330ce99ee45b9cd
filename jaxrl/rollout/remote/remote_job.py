"""A request to servers, and who waits for its samples."""

from concurrent.futures import Future
from dataclasses import dataclass

from jaxrl.rollout.protocol import Completion, Request


@dataclass
class Job:
    """Hold a request, and who waits for its samples."""

    request: Request
    futures: list[Future[Completion]]

    def deliver(self, outcome: list[Completion] | BaseException) -> None:
        """Give the outcome to whoever still waits."""
        for number, future in enumerate(self.futures):
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome[number])


def name_of(request: Request) -> str:
    """Describe a request as error messages call it."""
    return (
        f"a request of {len(request.keys)} samples of at most {request.sampling.max_tokens} tokens "
        f"for a prompt of {len(request.prompt_tokens)} tokens {list(request.prompt_tokens[:8])}..."
    )
