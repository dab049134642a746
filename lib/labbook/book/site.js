// A picture opens at full size.
addEventListener("click", (event) => {
  if (event.target.matches("article img") && !event.target.closest("a")) open(event.target.src);
});
