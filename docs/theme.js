// The explorer in a page of this site is as light or dark as the page.
"use strict";

{
  const tell = () => {
    const theme = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
    for (const frame of document.querySelectorAll("iframe.explorer")) frame.contentWindow.postMessage({ theme }, "*");
  };
  new MutationObserver(tell).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  addEventListener("load", tell);
}
